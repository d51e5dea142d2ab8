"""Whether a rank that makes no progress stands, or is at work: told from its stack and its CPU time over a while.

A long validation, a download, a compilation look like a hang to the ranks that wait. At work is who uses the CPU, with
its child processes, or is at ever new places; a line that polls with a sleep between is neither.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

_BUSY_CPU = 0.05  # of one core, over the later half of the time
_SAME_PLACE = 0.9  # of all looks, for a place to be the one where it stands
_FEWEST_LOOKS = 10  # to judge by places; and
_FEWEST_AT_ALL = 3
_MOST_LOOKS = 600


class Stillness:
    """Looks at one rank since its last progress; at most ``_MOST_LOOKS`` are kept."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float, Hashable]] = deque(maxlen=_MOST_LOOKS)

    def forget(self) -> None:
        """There was progress."""
        self._looks.clear()

    def look(self, now: float, cpu_s: float, place: Hashable) -> None:
        """``cpu_s``: CPU time of the process and its children so far; ``place``: equal for the same place."""
        self._looks.append((now, cpu_s, place))

    @property
    def is_busy(self) -> bool:
        """Whether it is at work; True also as long as nothing can be told."""
        if len(self._looks) < _FEWEST_AT_ALL:
            return True
        half = list(self._looks)[len(self._looks) // 2 :] if len(self._looks) >= _FEWEST_LOOKS else list(self._looks)
        (began, cpu_before, _), (ended, cpu_after, _) = half[0], half[-1]
        if cpu_after - cpu_before >= _BUSY_CPU * (ended - began):
            return True
        if len(self._looks) < _FEWEST_LOOKS:
            return False
        ((_, most),) = Counter(place for *_, place in self._looks).most_common(1)
        return most < _SAME_PLACE * len(self._looks)


def cpu_seconds() -> float:
    """CPU time of this process, and of its children that run, in seconds."""
    ticks = os.sysconf("SC_CLK_TCK")
    return time.process_time() + sum(_ticks_of(pid) for pid in _children()) / ticks


def place_of(thread_id: int) -> Hashable:
    """Where a thread of this process is: every frame's code and line; some 10 µs."""
    frame, place = sys._current_frames().get(thread_id), []
    while frame is not None:
        place.append((id(frame.f_code), frame.f_lineno))
        frame = frame.f_back
    return tuple(place)


def _children() -> list[str]:
    found: list[str] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended
            found += children.read_text().split()
    return found


def _ticks_of(pid: str) -> int:
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(facts[11]) + int(facts[12])
