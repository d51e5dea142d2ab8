"""``safetrain.breakpoint(rank=1)``: Python's debugger on one rank, while the others wait for it without a time limit.

A rank at the prompt says that it is paused, and then no rank's watchdog calls anybody late.
"""

from __future__ import annotations

import logging
import math
import os
import pdb
import sys
from collections.abc import Callable
from typing import Any

from safetrain.activity import ACTIVITY
from safetrain.comm import Comm
from safetrain.errors import UsageError
from safetrain.rank_log import terminal

logger = logging.getLogger("safetrain")


def breakpoint(rank: int = 0) -> None:
    """Stop ``rank`` in the debugger at the next line. The other ranks, where they call it too, wait until it goes on.

    It may also be called on the one rank alone. The prompt is on the terminal that the job was started from; where
    there is none, a warning says so, and training goes on.

    Raises:
        UsageError: there is no such rank.
    """
    comm, frame = Comm.live(), sys._getframe(1)
    world_size = 1 if comm is None else comm.world_size
    if not 0 <= rank < world_size:
        raise UsageError(f"safetrain.breakpoint(rank={rank}): there are {world_size} ranks, counted from 0")
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    over: Callable[[], None] = (lambda: None) if comm is None else comm.turn(f"breakpoint/{place}", rank)
    if comm is not None and comm.rank != rank:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        logger.warning(
            "rank %d: no debugger at %s, since standard input is no terminal. Start the job from one; or look in from "
            "outside, `py-spy dump --pid %d`. Training goes on.",
            rank, place, os.getpid(),
        )  # fmt: skip
        over()
        return
    out = terminal()
    out.write(f"\n[rank {rank}] breakpoint at {place}; c goes on, q ends the job\n")
    _Debugger(over, stdin=sys.stdin, stdout=out, nosigint=True).set_trace(frame)


class _Debugger(pdb.Pdb):
    def __init__(self, over: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._over = over

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """At the prompt."""
        with ACTIVITY.within("paused", math.inf):
            super().interaction(*args, **kwargs)

    def set_continue(self) -> None:
        super().set_continue()
        self._over()

    def set_quit(self) -> None:
        super().set_quit()
        self._over()
