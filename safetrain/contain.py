"""Idea 1, contain: run user code so that whatever it does, this rank goes on to its part in the collectives.

A ``Share`` is what one rank adds to one window. User code never raises out of here: it ends in the share's outcome.
The one exception is a failed collective, which says that a *peer* is gone: nothing is left to keep together then.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from safetrain.ballot import Outcome
from safetrain.comm import is_communication_error
from safetrain.errors import PeerFailed, RankFailed, RanksDiffer, SkipBatch, UsageError
from safetrain.failure import is_user_file
from safetrain.work import Work

_ALLOCATOR_TEXTS = ("DefaultCPUAllocator", "can't allocate memory", "CUDA out of memory", "CUDA error: out of memory")


OWN_BACKWARD = "training_step called backward() itself, and DDP would not reduce that: return the loss instead"


@dataclass(frozen=True, slots=True)
class Loss:
    """What ``training_step`` may return instead of a bare tensor.

    Attributes:
        value: a scalar, the *mean* over the micro-batch; or one such scalar for each optimizer, by its name.
        weight: how many samples (or tokens, or items) the mean is over; default: the samples in the batch.
            With weight 0 the loss is not used.
        skip: ask to leave this micro-batch out although a loss is given (see the skip policies).
    """

    value: torch.Tensor | Mapping[str, torch.Tensor]
    weight: int | torch.Tensor | None = None
    skip: bool = False


@dataclass(slots=True)
class Share:
    """What one rank adds to one window."""

    outcome: Outcome = Outcome.NO_DATA
    weight: int = 0
    reason: str = ""  # why it asks to skip, ran out of memory or failed: for people
    error: Exception | None = None
    phase: str = ""
    work: Work | None = None  # the batch at hand when that was noted
    at_hand: Work | None = None
    left_out: bool = False  # some micro-batch of it was left out
    losses: list[tuple[str, torch.Tensor, int]] = field(
        default_factory=list
    )  # (name, detached mean, weight), for the log
    census: Callable[[Exception], str] = lambda _: ""  # who holds the memory that there is none left of

    @property
    def spoiled(self) -> bool:
        """Whether the window is lost on this rank whatever its remaining micro-batches bring."""
        return self.outcome >= Outcome.OUT_OF_MEMORY

    def note(self, outcome: Outcome, reason: str = "", phase: str = "", error: Exception | None = None) -> None:
        """Record an outcome; the gravest stands."""
        if outcome > self.outcome:
            self.outcome, self.reason, self.phase, self.error = outcome, reason, phase, error
            self.work = self.at_hand

    def add(self, loss: Loss) -> None:
        """A micro-batch whose backward went well."""
        self.note(Outcome.OK)
        self.weight += int(loss.weight or 0)
        self.log(loss)

    def log(self, loss: Loss) -> None:
        """Keep a loss for the log, without its graph."""
        named = loss.value if isinstance(loss.value, Mapping) else {"": loss.value}
        for name, value in named.items():
            self.losses.append((f"loss/{name}" if name else "loss", value.detach(), int(loss.weight or 0)))

    def catch(self, error: Exception, phase: str) -> None:
        """Turn an exception of user code into an outcome, and free what its traceback holds (activations, for one).

        Raises:
            Exception: ``error`` itself where the other ranks have it, too, or where it comes from a collective: a peer
                is gone.
        """
        if isinstance(error, (RankFailed, PeerFailed, RanksDiffer)) or is_communication_error(error):
            raise error
        held = self.census(error) if is_out_of_memory(error) else ""
        traceback.clear_frames(error.__traceback__)
        where = place_of(error)
        if isinstance(error, SkipBatch):
            self.note(Outcome.SKIP, f"SkipBatch{_detail(error)} at {where}", phase)
        elif is_out_of_memory(error):
            self.note(Outcome.OUT_OF_MEMORY, f"out of memory in {phase} at {where}{_detail(error)}{held}", phase, error)
            error.__traceback__ = None
            free_memory()
        else:
            self.note(Outcome.FAILED, f"{type(error).__name__}{_detail(error)} in {phase} at {where}", phase, error)


def run_training_step(
    step: Callable[[Any, int | None], Any], batch: Any, samples: int | None, share: Share
) -> Loss | None:
    """The user's loss for one micro-batch, checked, with its weight filled in; None where there is nothing to train
    on."""
    try:
        loss = check_loss(step(batch, samples), samples)
    except Exception as error:  # noqa: BLE001  # any user error must become a vote, or the other ranks wait for ever
        share.catch(error, "training_step")
        return None
    if isinstance(loss, str):
        share.note(Outcome.SKIP, loss, "training_step")
        return None
    if loss.skip:
        share.note(Outcome.SKIP, "training_step asked to skip", "training_step")
    return loss


def check_loss(returned: Any, samples: int | None) -> Loss | str:
    """A complete ``Loss``, or in words why there is none.

    Raises:
        UsageError: ``training_step`` returned something that is no loss, or a weight cannot be known.
    """
    if returned is None:
        return "training_step returned None"
    loss = returned if isinstance(returned, Loss) else Loss(returned)
    values = loss.value.values() if isinstance(loss.value, Mapping) else (loss.value,)
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"training_step returned {type(value).__name__}: return a scalar tensor, None or safetrain.Loss"
            )
        if value.numel() != 1:
            raise UsageError(f"training_step returned a loss of shape {tuple(value.shape)}: return its mean, a scalar")
        if not value.requires_grad:
            return "the loss of training_step has no graph (a constant, or detached)"
    weight = samples if loss.weight is None else int(loss.weight)
    if weight is None:
        raise UsageError("can't tell how many samples this batch holds: return safetrain.Loss(loss, weight=<samples>)")
    if weight < 0:
        raise UsageError(f"safetrain.Loss(weight={weight}): a weight is a count, 0 or more")
    return Loss(loss.value, weight, loss.skip)


def is_out_of_memory(error: BaseException) -> bool:
    """Out of memory, on a device or the host. The CPU allocator raises a bare RuntimeError, told by its text."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATOR_TEXTS)


def free_memory() -> None:
    """Give back what can be given back after an out-of-memory error."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def place_of(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame that is the user's; of the innermost frame if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_user_file(frame.filename)]
    for frame in reversed(users or list(frames)):
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown place"


def _detail(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f": {text}" if text else ""
