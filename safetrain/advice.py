"""What to do about a standstill, by who runs the loop: safetrain's own, which has keys and methods for it, or a script
that knows nothing of safetrain and is only guarded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from safetrain.testimony import Testimony

SCRIPT = "script"
"""The phase of a guarded script: what it is doing can only be seen from its stack and its collectives."""


@dataclass(frozen=True)
class Advice:
    """``longer``: what lets a rank take its time; the rest are parts of sentences."""

    together: str
    limit: str
    longer: Callable[[Testimony], str]
    left_cause: str
    left_remedy: str
    loader_timeout: str
    to_look_into: str


def is_script(one: Testimony) -> bool:
    """Whether that rank runs a guarded script."""
    return one.phase == SCRIPT


def advice_on(one: Testimony) -> Advice:
    """The words that fit what that rank runs."""
    return FOR_A_SCRIPT if is_script(one) else _FOR_THE_LOOP


def _longer_in_the_loop(one: Testimony) -> str:
    section = one.phase.partition("rank_zero:")[2]
    if section:
        return _raise(f"limit_s of rank_zero({section!r})", one) + "."
    own = 'or give it a limit of its own: `with self.rank_zero("name", limit_s=...)`'
    return f"{_raise('watchdog.stall_s' if one.step > 0 else 'watchdog.first_step_stall_s', one)}, {own}."


def _longer_in_a_script(one: Testimony) -> str:
    if one.last_chance:
        return (
            "If it is meant to take so long, give the group more time: init_process_group(timeout=...). The others' "
            "wait would have ended by that limit in a moment."
        )
    return _raise("--busy-s" if one.state == "busy" else "--stall-s", one) + "."


def _raise(key: str, one: Testimony) -> str:
    return f"If it is meant to take so long, raise {key} (the limit was {one.limit_s:.3g} s)"


_FOR_THE_LOOP = Advice(
    together="call it on all ranks or on none. Decide together (self.agree), and do one rank's work in "
    '`with self.rank_zero("name") as mine:`, where the others wait without a collective.',
    limit="watchdog.stall_s",
    longer=_longer_in_the_loop,
    left_cause="an exception that was caught round fit(), or a loop that ended on some ranks only.",
    left_remedy="let exceptions end the process, and decide together (self.agree, self.stop) when to end.",
    loader_timeout="loader.timeout_s",
    to_look_into="To look into a rank, use safetrain.breakpoint(), which pauses all watchdogs.",
)
FOR_A_SCRIPT = Advice(
    together="call it on all ranks or on none: what decides must be the same everywhere (all_reduce a flag and let all "
    "ranks act on the sum), and ranks must have equally many batches (DistributedSampler, drop_last=True).",
    limit="--stall-s",
    longer=_longer_in_a_script,
    left_cause="a loop that ended on some ranks only (fewer batches, a break), an exit under a condition, or an "
    "exception that was caught.",
    left_remedy="let all ranks take the same number of steps (DistributedSampler, drop_last=True), and decide together "
    "when to end: all_reduce a flag, and let all ranks act on the sum.",
    loader_timeout="DataLoader(timeout=...)",
    to_look_into="To look into a rank, `py-spy dump --pid ...` stops nothing.",
)
