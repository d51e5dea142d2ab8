"""Where things stand on the time line of the failure page: all ranks on one clock, or, without times, in order.

Gloo does not tell when a collective ended, so its place is where it was issued. On the clock a long gap is shorter than
it is: a second of silence would leave no room for the milliseconds before it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from safetrain.page_facts import Call, Rank

_SHORT_NS = 200_000  # gaps below it are to scale
_LAST_GAP = 0.36  # of the width, at least, where ranks stand still: there it is written what they are in
_CALLS, _OWN_CALLS = 40, 3  # of a rank; of these, safetrain's own
_STEP_NS, _LAST_STEPS = 1_000_000, 6  # without times: from one collective to the next, and from the last to the end

Lane = Sequence[Rank]
Key = tuple[str, int]


@dataclass
class Mark:
    """One call on a lane: of the first rank to issue it, and of the last."""

    call: Call
    first_ns: int
    last_ns: int
    ended_ns: int | None
    ranks: int = 1


@dataclass(frozen=True)
class Row:
    """One lane; since when it has been in what it is in, and until when."""

    lane: Lane
    marks: Mapping[Key, Mark]
    since_ns: int
    until_ns: int


class Clock:
    """Times to places between ``left`` and ``right``, in steps that grow with the logarithm of a gap.

    ``ends_wide``: the last gap gets room for words.
    """

    def __init__(self, times: Iterable[int], left: float, right: float, *, ends_wide: bool) -> None:
        self.times = sorted(set(times)) or [0]
        gaps = [math.log1p((b - a) / _SHORT_NS) for a, b in pairwise(self.times)]
        if gaps and ends_wide:
            gaps[-1] = max(gaps[-1], sum(gaps[:-1]) * _LAST_GAP / (1 - _LAST_GAP))
        total = sum(gaps) or 1.0
        self.places = [left]
        for gap in gaps:
            self.places.append(self.places[-1] + gap / total * (right - left))

    def x(self, time_ns: int) -> float:
        return self.places[max(0, bisect_right(self.times, time_ns) - 1)]

    @property
    def quiet(self) -> float:
        """From here on nothing happens but the end."""
        return self.places[-2] if len(self.places) > 1 else self.places[0]


def stands(rank: Rank) -> bool:
    """Whether it is still in what it is in."""
    return rank.state in ("waiting", "stuck", "silent", "paused", "moving")


def is_clocked(lanes: Sequence[Lane]) -> bool:
    """Whether it is known of all collectives when they were issued."""
    return all(call.issued_ns is not None for lane in lanes for rank in lane for call in shown(rank))


def shown(rank: Rank) -> list[Call]:
    """The collectives that are drawn."""
    own = [call for call in rank.calls if call.about == "safetrain_control" and call.done][:-_OWN_CALLS]
    return [call for call in rank.calls if call not in own][-_CALLS:]


def rows(lanes: Sequence[Lane], end_ns: int | None) -> list[Row]:
    """``end_ns``: when the verdict was written; for ranks that say no time of their own."""
    clocked = is_clocked(lanes)
    times = _issued(lanes) if clocked else _columns(lanes)
    latest = max(times.values(), default=0)
    heard = [rank.at_ns for lane in lanes for rank in lane if rank.at_ns and stands(rank)]
    end = max(latest, *(heard or [end_ns or 0])) if clocked else latest + _LAST_STEPS * _STEP_NS
    found = []
    for lane in lanes:
        marks = _marks(lane, times, clocked)
        last = max((mark.last_ns for mark in marks.values()), default=0)
        span = _span(lane, last, end) if clocked else (last + _STEP_NS, end)
        found.append(Row(lane, marks, *span))
    return found


def _issued(lanes: Sequence[Lane]) -> dict[tuple[int, Key], int]:
    return {
        (rank.number, call.key): call.issued_ns or 0 for lane in lanes for rank in lane for call in shown(rank)
    }  # fmt: skip


def _columns(lanes: Sequence[Lane]) -> dict[tuple[int, Key], int]:
    """One call after the other, and the same call on all ranks in one column."""
    columns: dict[Key, int] = {}
    ranks = [(rank.number, [call.key for call in shown(rank)]) for lane in lanes for rank in lane]
    for _ in range(3):  # right of those before it on each rank; where ranks differ in the order, as near as can be
        for _, keys in ranks:
            column = 0
            for key in keys:
                column = columns[key] = max(columns.get(key, 0), column + 1)
    return {(number, key): columns[key] * _STEP_NS for number, keys in ranks for key in keys}


def _marks(lane: Lane, times: Mapping[tuple[int, Key], int], clocked: bool) -> dict[Key, Mark]:
    marks: dict[Key, Mark] = {}
    for rank in lane:
        for call in shown(rank):
            at = times[rank.number, call.key]
            if (mark := marks.get(call.key)) is None:
                ended = call.ended_ns if clocked and call.ended_ns is not None and call.ended_ns > at else None
                marks[call.key] = Mark(call, at, at, ended)
                continue
            mark.first_ns, mark.last_ns, mark.ranks = min(mark.first_ns, at), max(mark.last_ns, at), mark.ranks + 1
            if not call.done:
                mark.call = call
    return marks


def _span(lane: Lane, last: int, end: int) -> tuple[int, int]:
    if not any(map(stands, lane)):
        until = max(last, *(rank.at_ns or end for rank in lane))
        return until, until
    since = [rank.since_ns or end - int((rank.seconds or 0.0) * 1e9) for rank in lane]
    return max(0, min(*since, end)), end
