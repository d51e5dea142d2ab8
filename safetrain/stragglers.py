"""The rank that the others wait for: whose own work takes longer than its peers', time after time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SLOWER_BY = 0.25  # of the median rank's own work
_SLOWER_BY_S = 0.002  # and by at least so much a step: less is noise, or not worth a word
_INTERVALS = 3  # in a row
_WATCHED_S = 10.0  # of the rank's own work in them: on a busy machine each rank is the slower one for seconds at a time
_FAR_SLOWER = 2.0  # as much work as the others' is told sooner,
_WATCHED_FAR_SLOWER_S = 2.0  # after so long


@dataclass(frozen=True)
class Straggler:
    """A rank that was slower than its peers, in seconds a step of its own work."""

    rank: int
    own_s: float
    median_s: float
    slow_part: str
    slow_part_s: float
    median_part_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slower than the others, which wait for it at every step: its own work takes "
            f"{1000 * self.own_s:.1f} ms a step, theirs {1000 * self.median_s:.1f} ms. The difference is in "
            f"{self.slow_part}: {1000 * self.slow_part_s:.1f} ms against {1000 * self.median_part_s:.1f} ms."
        )


class StragglerWatch:
    """Looks at all ranks' own work once an interval; the same on every rank, as it is given the same numbers."""

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._intervals, self._own_s, self._median_s, self._told = 0, 0.0, 0.0, False

    def judge(self, work: Sequence[Mapping[str, float]], steps: int) -> Straggler | None:
        """``work``: seconds a step in each part, by rank, over ``steps``. Returns a rank that was the slowest by far
        for several intervals in a row, and for long enough; once, until it has recovered."""
        found = slowest(work)
        if found is None:
            self._suspect = None
            return None
        if found.rank != self._suspect:
            self._suspect = found.rank
            self._begin()
        self._intervals += 1
        self._own_s, self._median_s = self._own_s + steps * found.own_s, self._median_s + steps * found.median_s
        if self._told or self._intervals < _INTERVALS:
            return None
        far = self._own_s >= _FAR_SLOWER * self._median_s
        self._told = self._own_s >= (_WATCHED_FAR_SLOWER_S if far else _WATCHED_S)
        return found if self._told else None


def slowest(work: Sequence[Mapping[str, float]]) -> Straggler | None:
    """The rank with the most work of its own, if that is far above what the others have."""
    if len(work) < 2:
        return None
    totals = [sum(parts.values()) for parts in work]
    rank = max(range(len(work)), key=totals.__getitem__)
    others = [index for index in range(len(work)) if index != rank]
    median_s = statistics.median(totals[index] for index in others)
    if totals[rank] - median_s < max(_SLOWER_BY * median_s, _SLOWER_BY_S):
        return None
    medians = {part: statistics.median(work[index][part] for index in others) for part in work[rank]}
    part = max(work[rank], key=lambda name: work[rank][name] - medians[name])
    return Straggler(rank, totals[rank], median_s, part, work[rank][part], medians[part])
