"""Ranks that all wait in collectives wait for each other: who did not come to which call, and how it went past it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from safetrain.advice import advice_on, is_script
from safetrain.bypass import ways_past
from safetrain.standstill import Remedy
from safetrain.telling import alike, called, names, tell, verb, wait_in_words, when
from safetrain.testimony import Testimony

_WAYS_TOLD = 3


@dataclass(frozen=True)
class Deadlock:
    """``told``: the ranks that ``sentence`` says the place of."""

    sentence: str
    culprits: tuple[int, ...]
    told: tuple[Testimony, ...]
    remedy: Remedy


def explain(ranks: Sequence[Testimony]) -> Deadlock:
    """Of ranks that all wait. The fewer are at fault; where neither side is fewer, both may be."""
    sides = alike(ranks)
    if len(sides) == 1:
        return _all_in_one(ranks)
    fewest = min(map(len, sides))
    culprits = tuple(sorted(one.rank for side in sides if len(side) == fewest for one in side))
    # the call to tell of is the one in the user's code: the loop's own are the same on all ranks
    waiting = max(sides, key=lambda side: (side[0].user_frame is not None, len(side), -side[0].rank))
    one, others = waiting[0], [one for side in sides if side is not waiting for one in side]
    absent = [other for other in others if not _came(other, one)]
    if not absent:
        return _different_calls(sides, culprits)
    call, seconds = f"{wait_in_words(one)}{called(one) if is_script(one) else when(one)}", f"{one.seconds:.0f} s"
    if len(waiting) < len(absent):
        story = f"only {names(waiting)} came to {call}; {names(absent)} did not, within {seconds}"
    else:
        has = verb(waiting, "has", "have")
        story = f"{names(absent)} did not come to {call}, where {names(waiting)} {has} waited for {seconds}"
    return Deadlock(
        f"Training stalled: {story}.", culprits, tuple(waiting), Remedy("waiting", _way(one), advice_on(one).together)
    )


def _all_in_one(ranks: Sequence[Testimony]) -> Deadlock:
    told = tell(ranks)
    sentence = f"Training stalled: {told[0].lower()}{told[1:-1]}, all of them, for {ranks[0].seconds:.0f} s."
    remedy = Remedy(
        "waiting",
        "the network lost a message or is very slow, or a group that other processes belong to.",
        "look at the network between the machines. If the wait is a long one by nature, raise "
        f"{advice_on(ranks[0]).limit} (it was {ranks[0].limit_s:.3g} s).",
    )
    return Deadlock(sentence, tuple(one.rank for one in ranks), tuple(ranks[:1]), remedy)


def _different_calls(sides: Sequence[Sequence[Testimony]], culprits: tuple[int, ...]) -> Deadlock:
    one, other = sides[0][0], sides[1][0]
    sentence = (
        f"Training stalled: the ranks call different collectives at the same point: {names(sides[0])} "
        f"{wait_in_words(one)}{called(one)}, {names(sides[1])} {wait_in_words(other)}{called(other)}"
        f"{',' if when(one) else ''}{when(one)}, for {one.seconds:.0f} s."
    )
    cause = "two branches of a condition that differs between ranks, or the same calls in another order."
    return Deadlock(sentence, culprits, tuple(sides[0]), Remedy("waiting", cause, advice_on(one).together))


def _came(other: Testimony, one: Testimony) -> bool:
    """Whether ``other`` has come to what ``one`` waits in; True also where it need not."""
    call = one.pending
    if ":" in one.phase or call is None:
        return other.phase == one.phase and other.step == one.step
    if call.members and other.rank not in call.members:
        return True
    return max((c.number for c in other.collectives if c.group == call.group), default=0) >= call.number


def _way(one: Testimony) -> str:
    ways = ways_past(one.stack)
    if not ways:
        return (
            "a collective, or a return, break or continue round one, under a condition that differs between ranks; or "
            "calls in another order."
        )
    return f"a condition that differs between ranks. Ways past that line: {'; '.join(ways[-_WAYS_TOLD:])}."
