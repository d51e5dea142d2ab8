"""Which other ranks of this machine are gone, and how they ended: for a rank that no launcher of ours speaks for.

Another launcher, such as torchrun, tells an exit code at best, in a report of its own, and ends all ranks 0.1 s later.
Until it has read that code the kernel keeps it for everybody to see.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from safetrain.failure import Exit, read_failures
from safetrain.joining import known_places
from safetrain.stacks import ENDED, state_of

_EXIT_CODE = 49  # in /proc/<pid>/stat, counted after the name of the command
_LIMIT_S = 0.05  # a process closes its connections a moment before it is gone


def gone_ranks(*, at_once: bool = False) -> list[Exit]:
    """The ranks that have ended. Call it when a connection to some rank has broken; else it need not wait for one to
    be gone (``at_once``)."""
    here = [place for place in known_places() if place.is_here and place.pid != os.getpid()]
    several = any(not place.is_here for place in known_places())
    deadline = time.monotonic() + _LIMIT_S
    while True:
        ends = [
            Exit(place.rank, place.pid, _exit_code(place.pid), host=place.host if several else "")
            for place in here
            if state_of(place.pid) in ENDED
        ]
        if ends or at_once or time.monotonic() > deadline:
            return ends
        time.sleep(0.002)


def someone_failed(run_dir: Path | None) -> bool:
    """Whether a rank of this machine is gone, or some rank has left a record of its failure in ``run_dir``."""
    return bool(gone_ranks(at_once=True) or (run_dir is not None and read_failures(run_dir)))


def _exit_code(pid: int) -> int | None:
    """Negative for a signal; None where its parent has read it already."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(facts[_EXIT_CODE]))
