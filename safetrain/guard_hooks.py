"""What a guarded script does that the other ranks, or the person who started it, should know of."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from safetrain import guard_preflight, joining, script_groups
from safetrain.board import Board
from safetrain.call_site import place_here
from safetrain.failure import Failure
from safetrain.guard_options import GuardOptions
from safetrain.guarded import Guarded

_PACKAGE = str(Path(__file__).parent)


def follow_groups(guarded: Guarded, board: Board, options: GuardOptions, say: Callable[[str], None]) -> None:
    """Note when the script makes and destroys its default group; compare the ranks when it first does."""
    compared, pid = False, os.getpid()
    script = Path(options.script).absolute() if not options.is_module and Path(options.script).is_file() else None

    def made() -> None:
        nonlocal compared
        if os.getpid() != pid:  # a forked child makes a group of its own
            return
        if script_groups.world_of_group() != guarded.world_size:
            say(
                f"the script has started {script_groups.world_of_group()} ranks by itself; only those that torchrun "
                f"starts are guarded: torchrun --nproc-per-node {script_groups.world_of_group()} "
                f"-m safetrain.guard {options.script} ..."
            )
            return
        if guarded.left:
            guarded.left = ""
            _say_on(board, "")
        if options.preflight and not compared and guarded.world_size > 1:
            compared = True
            seen = guard_preflight.facts(script, script_groups.backend())
            joining.connection("guard_preflight").set(f"facts/{guarded.rank}", json.dumps(seen))
            if guarded.rank == 0:
                guard_preflight.compare(joining.connection("guard_preflight"), guarded.world_size, say)

    def destroyed(where: str) -> None:
        if os.getpid() != pid:
            return
        guarded.left = f"destroyed its process group {where}"
        _say_on(board, guarded.left)

    def spawns(where: str) -> None:
        say(
            f"{options.script} starts processes by itself, {where}: these are not guarded. If they are its ranks, let "
            f"torchrun start them: torchrun --nproc-per-node N -m safetrain.guard {options.script} ..."
        )

    script_groups.tell_of_groups(made, destroyed, spawns)


def _say_on(board: Board, how: str) -> None:
    with suppress(Exception):  # the store went with the rank that served it, which was done first
        board.leave(how)


def note_exits(run_dir: Path, guarded: Guarded, board: Board) -> None:
    """Note where the script calls ``os._exit``, by which a process is gone without a word."""
    leave, pid = os._exit, os.getpid()

    def noting(code: int) -> NoReturn:
        caller = sys._getframe(1).f_code.co_filename
        if os.getpid() == pid and not caller.startswith(_PACKAGE):
            place = place_here()
            if code == 0:
                _say_on(board, f"called os._exit(0) at {place}")
            else:
                failure = Failure.of(SystemExit(code), guarded.rank, victim=False)
                told = replace(failure, error="os._exit", message=f"exit code {code}", place=place, traceback="")
                told.write(run_dir)
                for child in multiprocessing.active_children():
                    child.kill()
        leave(code)

    os._exit = noting  # type: ignore[assignment]
