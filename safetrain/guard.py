"""``torchrun --nproc-per-node 2 -m safetrain.guard train.py``: any torch.distributed script, unchanged, that never
waits or dies without saying why.

Each rank's process meets the others, sends its output to its log, starts the watchdog, and then runs the script as
Python itself would. The script need not know: what it does is seen from its process groups and its stack (guarded.py).
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from safetrain.errors import UsageError, together
from safetrain.guard_options import RUNS, GuardOptions, parse
from safetrain.scheduler import placement

_WRONG_USE = 2


def main(arguments: Sequence[str]) -> int:
    """Run the script; returns when it has ended well, and ends this process where it has not."""
    try:
        options = parse(arguments)
    except UsageError as wrong:  # all ranks have the same command line
        return _complain(together(wrong))
    try:
        return _guard(options)
    except UsageError as wrong:
        return _complain(wrong)


def _complain(wrong: UsageError) -> int:
    """Once, where all ranks have come to the same; a rank that has met nobody is heard by itself."""
    if not wrong.together or _is_rank_0():
        print(f"safetrain.guard: {wrong}", file=sys.stderr)
    return _WRONG_USE


def _is_rank_0() -> bool:
    try:
        place = placement(os.environ)
    except UsageError:  # incomplete; which is told where it matters
        return os.environ.get("RANK", "0") == "0"
    return place is None or place.rank == 0


def _guard(options: GuardOptions) -> int:
    from safetrain import flight_recorder, joining
    from safetrain.comm import launcher_place
    from safetrain.guard_ending import ENDED, Ending
    from safetrain.guard_hooks import follow_groups, note_exits
    from safetrain.guarded import Guarded
    from safetrain.rank_log import redirect_output
    from safetrain.run_dir import shown
    from safetrain.run_script import run_script
    from safetrain.stacks import answer_signals
    from safetrain.watchdog import Watch

    flight_recorder.switch_on()
    rank, world_size, local_rank, _ = launcher_place()
    if (place := placement(os.environ)) is not None:
        os.environ.update(place.environment())
    if world_size > 1:
        store = joining.meet(rank, world_size, joining.join_limit_s(options.join_s), for_gloo=False).store
        if rank == 0:
            store.set("run_dir", str(_take_run_dir(options)))
        run_dir = Path(store.get("run_dir").decode())
    else:
        run_dir = _take_run_dir(options)
    log = redirect_output(run_dir, rank, logging_too=False)

    def say(text: str) -> None:
        log.terminal.write(f"safetrain.guard: {text}\n")
        log.terminal.flush()

    faulthandler.enable()
    os.register_at_fork(after_in_child=answer_signals)
    ending: Ending
    guarded = Guarded(rank, world_size, local_rank, options, lambda board: ending.look_round(board), say)
    board = guarded.board()
    ending = Ending(rank, world_size, run_dir, log, board)
    ending.answer_sigterm(guarded.board())
    if rank == 0:
        alone = "" if world_size > 1 else "; for more, torchrun --nproc-per-node 2 -m safetrain.guard ..."
        say(f"{world_size} rank{'s' * (world_size > 1)}, {shown(run_dir)}{alone}")
    follow_groups(guarded, board, options, say)
    note_exits(run_dir, guarded, board)
    watch = Watch(guarded, options.watchdog(), run_dir, tells=True)
    try:
        run_script(options.script, options.arguments, is_module=options.is_module)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            ending.by_error(leave)
    except BaseException as error:  # noqa: BLE001  whatever it is, this rank must say so and go
        ending.by_error(error)
    guarded.left = ENDED
    ending.note_end()
    watch.stop()
    log.flush()
    return 0


def _take_run_dir(options: GuardOptions) -> Path:
    """Absolute, since the script may go elsewhere; what an earlier run has left there is put away."""
    from safetrain.guard_ending import RANK_0_IS_DONE
    from safetrain.run_dir import choose_run_dir
    from safetrain.verdict import put_away

    run_dir = Path(options.run_dir or choose_run_dir(RUNS)).absolute()
    if run_dir.exists():
        put_away(run_dir)
        (run_dir / RANK_0_IS_DONE).unlink(missing_ok=True)
    return run_dir


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
