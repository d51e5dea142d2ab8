"""What the loop does when something is not as it should be: one small object for each question, chosen in the config.

Every decision is taken from the tally (see ballot.py), which is the same on all ranks, so all ranks decide alike.
``max_consecutive`` bounds how many windows in a row may be dropped for one reason; the next one ends the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from safetrain.ballot import Tally
from safetrain.errors import ConfigError, TrainingStopped

_KEYS = {"skip": "skip", "out of memory": "out_of_memory", "non-finite gradient": "non_finite"}
"""The policy that has a say, by the reason to drop a window."""

_REMEDIES = {
    "skip": "look at the batches that the warnings tell of, and mend the data or training_step; or allow more with "
    "policy.skip.max_consecutive. Then go on with resume=auto.",
    "out of memory": "a smaller loader.batch_size with a larger loop.accumulate trains the same. Then go on with "
    "resume=auto.",
    "non-finite gradient": "set loop.clip_norm (1.0, say), or precision=bf16 where it is fp16, and go on from the last "
    "checkpoint before the trouble (resume=RUN/checkpoints/step_N). Or begin again with a lower optimizer.lr: a run "
    "that goes on keeps its checkpoint's.",
}


class SkipPolicy(Protocol):
    """Some ranks ask to leave a micro-batch out."""

    uses_offered_loss: ClassVar[bool]  # a loss given together with the request may still be used

    @property
    def max_consecutive(self) -> int:
        """How many windows in a row may be dropped."""
        ...

    def drops(self, tally: Tally) -> bool:
        """Whether all ranks drop the whole window."""
        ...


class UnevenPolicy(Protocol):
    """Ranks have different numbers of batches."""

    def ends_epoch(self, tally: Tally) -> bool:
        """Whether the epoch is over, for all ranks."""
        ...


@dataclass(frozen=True)
class _Limited:
    max_consecutive: int = 100

    def __post_init__(self) -> None:
        if self.max_consecutive < 0:
            raise ConfigError(f"max_consecutive={self.max_consecutive}: must be 0 (stop at the first) or more")


@dataclass(frozen=True)
class SkipAny(_Limited):
    """One rank asks, all ranks skip the window: nobody trains on less than the whole batch."""

    uses_offered_loss: ClassVar[bool] = False

    def drops(self, tally: Tally) -> bool:
        return tally.skip > 0


@dataclass(frozen=True)
class SkipPartial(_Limited):
    """Only the asking rank's micro-batch is left out; what remains is weighted exactly."""

    uses_offered_loss: ClassVar[bool] = False

    def drops(self, tally: Tally) -> bool:
        return tally.weight == 0


@dataclass(frozen=True)
class SkipAll(_Limited):
    """Skip the window only when every rank asks. Else a loss offered with the request (``Loss(..., skip=True)``) is
    used."""

    uses_offered_loss: ClassVar[bool] = True

    def drops(self, tally: Tally) -> bool:
        return tally.skip == tally.world_size


@dataclass(frozen=True)
class UnevenStop:
    """End the epoch together, after the window in which the first rank ran out of data."""

    def ends_epoch(self, tally: Tally) -> bool:
        return tally.more_data < tally.world_size


@dataclass(frozen=True)
class UnevenContinue:
    """Go on until all are out of data: every sample is used once; ranks without data add nothing."""

    def ends_epoch(self, tally: Tally) -> bool:
        return tally.more_data == 0


@dataclass(frozen=True)
class NonFiniteSkip(_Limited):
    """A gradient is infinite or NaN: drop the window. A loss scale that is still coming down does not count as
    consecutive."""

    max_consecutive: int = 10


@dataclass(frozen=True)
class NonFiniteStop(NonFiniteSkip):
    """A gradient is infinite or NaN: end the job, on all ranks."""

    max_consecutive: int = 0


@dataclass(frozen=True)
class OutOfMemorySkip(_Limited):
    """Out of memory on any rank: free what can be freed, drop the window on all ranks."""

    max_consecutive: int = 3


@dataclass(frozen=True)
class OutOfMemoryStop(OutOfMemorySkip):
    """Out of memory on any rank: end the job, on all ranks."""

    max_consecutive: int = 0


@dataclass(frozen=True)
class UnusedZeros:
    """A parameter without gradient on some ranks counts as zero there; warn once, with the names and the rank."""

    stops = False


@dataclass(frozen=True)
class UnusedStop:
    """A parameter without gradient on any rank ends the job, on all ranks, with the names."""

    stops = True


@dataclass(frozen=True)
class Policies:
    """The answers of one run."""

    skip: SkipPolicy = field(default_factory=SkipAny)
    uneven: UnevenPolicy = field(default_factory=UnevenStop)
    non_finite: NonFiniteSkip = field(default_factory=NonFiniteSkip)
    out_of_memory: OutOfMemorySkip = field(default_factory=OutOfMemorySkip)
    unused: UnusedZeros | UnusedStop = field(default_factory=UnusedZeros)

    def drops(self, tally: Tally) -> str | None:
        """Why all ranks drop this window before its optimizer step; None: they don't."""
        if tally.out_of_memory:
            return "out of memory"
        if tally.skip and self.skip.drops(tally):
            return "skip"
        return None

    def limit(self, reason: str) -> int:
        """How many consecutive drops are allowed for ``reason``."""
        limit: int = getattr(self, _KEYS[reason]).max_consecutive
        return limit

    def stopped(self, step: int, reason: str, who: str, windows: int, where: str) -> TrainingStopped:
        """The error that says the limit was passed, and what to change: the state itself would come to it again."""
        limit = self.limit(reason)
        text = (
            f"stopped at step {step}: {reason}{who}, {windows} window(s) in a row, and policy.{_KEYS[reason]}."
            f"max_consecutive={limit} allows {limit}. The warnings before this say where it comes from.{where}"
        )
        return TrainingStopped(text, step=step, remedy=_REMEDIES[reason])
