"""Memory that will run out: a rank whose use rises steadily, and how many steps what is left will last.

A false alarm costs more trust than a late one, so all of this must hold: the use rose in each of the last four logging
intervals, the smallest rise is at least half the largest (what a run takes while it warms up comes ever slower), and
what is left is full before the run's end and within 100 times the steps that were looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from safetrain.finding import size
from safetrain.words import ranks_in_words

_RISES = 4
_STEADY = 0.5
_LEAST_BYTES = 1 << 16  # a step; less is the allocator's grain
_LOOKS_AHEAD = 100
_REMEDIES = {
    "host": "Something is kept at every step: losses without .item() or .detach(), batches in a list, a cache in the "
    "dataset. What a rank's loader processes hold is not counted here.",
    "device": "Something is kept at every step: losses with their graphs (add .detach()), or outputs in a list.",
}


@dataclass(frozen=True)
class Growth:
    """Memory that grows until it is full.

    Attributes:
        ranks: whose grows; ``bytes_per_step``: of the one that grows most.
        left: bytes left to them; ``steps``: how long that lasts.
    """

    kind: str
    ranks: tuple[int, ...]
    bytes_per_step: float
    left: float
    steps: int

    def __str__(self) -> str:
        whose = f"rank {self.ranks[0]}'s {self.kind} memory grows by"
        if len(self.ranks) > 1:
            whose = f"the {self.kind} memory of {ranks_in_words(self.ranks)} grows, by up to"
        where = "on its machine" if self.kind == "host" else "on its GPU"
        return (
            f"memory will run out: {whose} {size(self.bytes_per_step)} a step; the {size(self.left)} left {where} "
            f"{'are' if self.left >= 2 else 'is'} full in about {self.steps} steps. {_REMEDIES[self.kind]}"
        )


class GrowthWatch:
    """Looks at all ranks' use once a logging interval; the same on every rank, as it is given the same numbers.

    Args:
        sharers: how many ranks in a row have one memory between them.
    """

    def __init__(self, kind: str, sharers: int) -> None:
        self._kind, self._sharers = kind, max(1, sharers)
        self._seen: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_RISES + 1)
        self._told: tuple[tuple[int, ...], int] | None = None

    def judge(self, step: int, used: Sequence[float], left: Sequence[float], total_steps: int | None) -> Growth | None:
        """``used``, ``left``: bytes, by rank, after ``step`` steps of ``total_steps``. A growth is told once, and again
        when half the time is over, or when other ranks grow."""
        if self._seen and self._seen[-1][0] >= step:
            self._seen.clear()
        self._seen.append((step, tuple(used)))
        found = self._growth(step, left, total_steps)
        if found is None or (self._told and found.ranks == self._told[0] and found.steps > self._told[1] / 2):
            return None
        self._told = found.ranks, found.steps
        return found

    def _growth(self, step: int, left: Sequence[float], total_steps: int | None) -> Growth | None:
        rises = [rise_per_step([(at, used[rank]) for at, used in self._seen]) for rank in range(len(left))]
        soonest: tuple[float, int] | None = None
        for rank, rise in enumerate(rises):
            if rise:
                first = rank - rank % self._sharers
                together = sum(rises[first : first + self._sharers])
                soonest = min(soonest or (float("inf"), 0), (left[rank] / together, rank))
        if soonest is None:
            return None
        steps, rank = soonest
        ends_in = float("inf") if total_steps is None else total_steps - step
        if steps >= min(ends_in, _LOOKS_AHEAD * (step - self._seen[0][0])):
            return None
        growing = tuple(rank for rank, rise in enumerate(rises) if rise)
        return Growth(self._kind, growing, max(rises), left[rank], int(steps))


def rise_per_step(points: Sequence[tuple[int, float]]) -> float:
    """Bytes a step by which a use, seen as (step, bytes), rises; 0 where it does not, or not steadily."""
    rises = [(after - before) / (later - earlier) for (earlier, before), (later, after) in pairwise(points)]
    if len(rises) < _RISES or min(rises) < max(_LEAST_BYTES, _STEADY * max(rises)):
        return 0.0
    return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
