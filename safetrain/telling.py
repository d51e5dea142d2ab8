"""One rank, or several that do the same, in words: where they are, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence

from safetrain.advice import is_script
from safetrain.standstill import remedy_for
from safetrain.testimony import Testimony
from safetrain.words import call_in_words, ranks_in_words

_SOME_WAIT = "a wait for other ranks"
_DOING = {
    "data": "fetching data",
    "build": "building",
    "log": "logging",
    "epoch_start": "in on_epoch_start",
    "validation_end": "in on_validation_end",
    "train_end": "in on_train_end",
    "vote": "in the vote",
    "optimizer": "in the optimizer step",
}


def alike(ranks: Sequence[Testimony]) -> list[list[Testimony]]:
    """The ranks in groups of those that do the same."""
    groups: dict[object, list[Testimony]] = {}
    for one in ranks:
        groups.setdefault(situation(one), []).append(one)
    return list(groups.values())


def situation(one: Testimony) -> tuple[object, ...]:
    """Equal for ranks that are at the same place."""
    call = one.pending if one.state == "waiting" else None
    at = None if call is None else (call.group, call.number, call.op, call.shapes)
    return one.state, one.step, one.phase, at, one.user_frame, one.process_state


def tell(group: Sequence[Testimony]) -> str:
    """A sentence about ranks that do the same."""
    one, who = group[0], names(group).capitalize()
    if one.state == "left":
        return f"{who} {left_how(one)}."
    if one.state == "waiting":
        last = f", after {one.calls[-1]}" if one.calls and one.user_frame is None else ""
        return f"{who} {verb(group, 'waits', 'wait')} {wait_of(one)}{called(one)}{when(one)}{last}."
    idle = " under way" if is_script(one) else ""
    doing = idle if one.state in ("moving", "paused") else f" {remedy_for(one).state}"
    at = f", at {one.user_frame}" if one.user_frame else ""
    return f"{who} {verb(group, 'is', 'are')}{doing}{when(one)}, for {one.seconds:.0f} s{at}."


def names(group: Sequence[Testimony]) -> str:
    """``ranks 0 and 2``."""
    return ranks_in_words([one.rank for one in group])


def verb(group: Sequence[object], singular: str, plural: str) -> str:
    return singular if len(group) == 1 else plural


def called(one: Testimony) -> str:
    return f" (called at {one.user_frame})" if one.user_frame else ""


def left_how(one: Testimony) -> str:
    """What a rank that is no longer watched did."""
    return one.note or "left fit()"


def when(one: Testimony) -> str:
    """`` in training_step at step 5``, with a space before it; nothing for a script, of which no step is known."""
    place = "" if is_script(one) else _when(one)
    return f" {place}" if place else ""


def _when(one: Testimony) -> str:
    step = "" if one.phase in ("start", "build", "done") else f" at step {one.step}"
    meeting, _, name = one.phase.partition(":")
    if not meeting or (name and one.state == "waiting"):  # not known, or told by what it waits in
        return step.strip()
    return f"in {meeting}({name!r}){step}" if name else f"{_DOING.get(meeting, f'in {meeting}')}{step}"


def wait_of(one: Testimony) -> str:
    """After "waits"."""
    words = wait_in_words(one)
    return "for other ranks" if words == _SOME_WAIT else f"in {words}"


def wait_in_words(one: Testimony) -> str:
    """What a waiting rank waits in: ``all_reduce of 72 floats (the gradients)``, ``barrier('saved')``."""
    meeting, _, name = one.phase.partition(":")
    if name:
        return f"{meeting}({name!r})"
    return _SOME_WAIT if one.pending is None else call_in_words(one.pending)
