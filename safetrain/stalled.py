"""Idea 5, watch: from what all ranks say to one verdict. Pure functions: what is known goes in, words come out.

A rank that waits for others is never the culprit while one of them still moves. A rank that is stuck outside any
collective, or does not answer, is. Where all of them wait in collectives, they wait for each other: the fewer are at
fault, and both sides' calls are told.
"""

from __future__ import annotations

from collections.abc import Sequence

from safetrain.advice import advice_on, is_script
from safetrain.deadlock import explain
from safetrain.failure import is_user_file
from safetrain.standstill import Remedy, remedy_for
from safetrain.telling import alike, called, left_how, names, situation, tell, verb, wait_in_words, when
from safetrain.testimony import Testimony
from safetrain.verdict import Verdict

_SHOWN_FRAMES = 12


def judge(testimonies: Sequence[Testimony]) -> Verdict | None:
    """The verdict on a job of which some rank makes no progress; None where the job as a whole still moves."""
    ranks = sorted(testimonies, key=lambda one: one.rank)
    culprits = [one for one in ranks if one.state in ("stuck", "silent")]
    if any(one.state == "paused" for one in ranks):  # somebody is debugging: nobody is late
        return None
    if culprits:
        return stands(culprits, ranks)
    if any(one.state == "moving" for one in ranks):
        return None
    left = [one for one in ranks if one.state == "left"]
    if left and len(left) < len(ranks):
        return _left(left, ranks)
    if left:
        return None
    found = explain(ranks)
    return _verdict(found.sentence, found.culprits, found.told, ranks, found.remedy)


def judge_alone(one: Testimony) -> Verdict:
    """The verdict of a rank that makes no progress and can't ask the others."""
    remedy = Remedy(
        "alone",
        "the ranks' store is gone or does not answer: the launcher, or the rank that serves it (rank 0 where there is "
        "no launcher), was stopped or killed; or the network is down."
        if one.state == "waiting"
        else remedy_for(one).cause,
        "look at that process and at its log." if one.state == "waiting" else remedy_for(one).remedy,
    )
    doing = f"waits in {wait_in_words(one)}{called(one)}" if one.state == "waiting" else "is stuck"
    sentence = (
        f"Training stalled: rank {one.rank} {doing}{when(one)} ({one.host}, process {one.pid}), without progress for "
        f"{one.seconds:.0f} s, and the other ranks cannot be asked."
    )
    return _verdict(sentence, [one.rank], [one], [one], remedy)


def stands(culprits: Sequence[Testimony], ranks: Sequence[Testimony]) -> Verdict:
    first = max(culprits, key=lambda one: (one.state == "silent", one.seconds))
    same = [one for one in culprits if situation(one) == situation(first)]
    remedy = remedy_for(first)
    sentence = (
        f"Training stalled: {names(same)} {verb(same, 'is', 'are')} {remedy.state}{when(first)} "
        f"({first.host}, process {first.pid}), without progress for {first.seconds:.0f} s."
    )
    return _verdict(sentence, [one.rank for one in same], same, ranks, remedy)


def _left(left: Sequence[Testimony], ranks: Sequence[Testimony]) -> Verdict:
    waiting = [one for one in ranks if one.state != "left"]
    one, advice = waiting[0], advice_on(waiting[0])
    where = f" in {wait_in_words(one)}{called(one)}" if is_script(one) else when(one)
    others = f"{names(waiting)} {verb(waiting, 'waits', 'wait')}{where}"
    sentence = f"Training stalled: {names(left)} {left_how(left[0])} while {others}."
    remedy = Remedy("left", advice.left_cause, advice.left_remedy)
    return _verdict(sentence, [one.rank for one in left], left, ranks, remedy)


def _verdict(
    sentence: str, culprits: Sequence[int], told: Sequence[Testimony], ranks: Sequence[Testimony], remedy: Remedy
) -> Verdict:
    """``told``: the ranks that the sentence is about; all others get one of their own."""
    frame = told[0].user_frame
    return Verdict(
        sentence=sentence,
        culprits=tuple(culprits),
        place=str(frame or ""),
        detail=frame.source if frame else "",
        others=tuple(tell(group) for group in alike([one for one in ranks if one not in told])),
        cause=remedy.cause,
        remedy=remedy.remedy,
        evidence=_stack(told[0]),
        ranks=tuple(ranks),
    )


def _stack(one: Testimony) -> tuple[str, ...]:
    """From the user's first frame on; the frames before it are in the file."""
    first = next((index for index, frame in enumerate(one.stack) if is_user_file(frame.file)), -_SHOWN_FRAMES)
    frames = one.stack[first:]
    if len(frames) < 2:  # the place says it all
        return ()
    return f"Stack of rank {one.rank}, innermost last:", *(f"  {frame}" for frame in frames)
