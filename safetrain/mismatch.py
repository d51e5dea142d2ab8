"""Where the ranks' collectives part: a call that is not the same on all of them, or to which some have not come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from safetrain.page_facts import Call, Rank

_SAME_SIZES = ("all_reduce", "broadcast", "reduce")
"""Elsewhere the ranks may rightly give tensors of different sizes, or none."""


@dataclass(frozen=True)
class Mismatch:
    """``sides``: the ranks that made each call, largest side first; ``absent``: the ranks that have not come to it."""

    call: Call
    sides: tuple[tuple[Call, tuple[int, ...]], ...]
    absent: tuple[int, ...]

    @property
    def differs(self) -> bool:
        return len(self.sides) > 1


def mismatches(ranks: Sequence[Rank]) -> list[Mismatch]:
    """Calls that differ first; then those that ranks wait in, and others have not come to."""
    by_key: dict[tuple[str, int], list[tuple[Rank, Call]]] = {}
    for rank in ranks:
        for call in rank.calls:
            by_key.setdefault(call.key, []).append((rank, call))
    last = {(rank.number, call.group): call.number for rank in ranks for call in sorted(rank.calls, key=_number)}
    waited_in = {rank.pending.key for rank in ranks if rank.state == "waiting" and rank.pending}
    found = []
    for key, calls in by_key.items():
        sides: dict[object, list[tuple[Rank, Call]]] = {}
        for rank, call in calls:
            sides.setdefault(_what(call), []).append((rank, call))
        group, number = key
        members = frozenset().union(*(call.members for _, call in calls))
        absent = tuple(
            rank.number
            for rank in ranks
            if key in waited_in
            and rank.state in ("waiting", "stuck", "silent", "moving")
            and last.get((rank.number, group), 0 if rank.calls or rank.state == "silent" else number) < number
            and (rank.number in members or not members)
        )
        if len(sides) > 1 or absent:
            largest = sorted(sides.values(), key=len, reverse=True)
            told = tuple((side[0][1], tuple(rank.number for rank, _ in side)) for side in largest)
            found.append(Mismatch(told[0][0], told, absent))
    return sorted(found, key=lambda one: (not one.differs, one.call.number))


def _number(call: Call) -> int:
    return call.number


def _what(call: Call) -> object:
    return (call.op, call.shapes, call.dtype) if call.op in _SAME_SIZES else call.op
