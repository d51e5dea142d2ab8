"""What a rank's ``fit()`` came to, as plain data to compare over ranks; and batches that differ by rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import safetrain
from tests.ranks.toys import Batch, PerRank, assert_same, momentum_sgd, ready, samples, state


class Place(NamedTuple):
    """How many ranks, and which of them has the fault."""

    world_size: int
    culprit: int

    @property
    def victims(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.culprit]


@dataclass
class Ended:
    """``error`` is a class name, empty after a clean end."""

    error: str = ""
    text: str = ""
    cause: str = ""
    step: int = 0
    applied_steps: int = 0
    ranks: tuple[int, ...] = ()
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def end_of(trainer: safetrain.Trainer) -> Ended:
    """Run ``fit()`` to its end, good or bad. Errors that are not safetrain's own come through."""
    with warnings_of_safetrain() as log:
        try:
            result = trainer.fit()
        except safetrain.SafetrainError as error:
            return Ended(
                type(error).__name__, str(error), repr(error.__cause__), getattr(error, "step", trainer.step),
                ranks=getattr(error, "ranks", ()), log=log,
            )  # fmt: skip
    return Ended("", "", "", result.step, result.applied_steps, (), state(trainer), dict(result.metrics), log)


@contextmanager
def warnings_of_safetrain() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("safetrain")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def batches_of(world_size: int, count: int | Sequence[int], size: int = 4) -> list[list[Batch]]:
    """``count`` different batches (of each rank, or of all) for each rank."""
    counts = [count] * world_size if isinstance(count, int) else count
    return [[samples(size, seed=1000 * rank + step) for step in range(counts[rank])] for rank in range(world_size)]


def windows_of(batches: Sequence[Sequence[Batch]], accumulate: int = 1) -> list[list[Batch]]:
    """What all ranks together see in each window; a rank that is through with its own adds nothing."""
    longest = max(map(len, batches))
    starts = range(0, longest, accumulate)
    return [[batch for mine in batches for batch in mine[start : start + accumulate]] for start in starts]


def feed(batches: Sequence[Sequence[Any]]) -> Any:
    """Training data of which rank r sees the r-th list."""
    return ready(PerRank(batches))


def train_like_ddp(
    model: nn.Module,
    windows: Sequence[Sequence[Batch]],
    make_optimizer: Callable[..., Optimizer] = momentum_sgd,
    loss: Callable[[nn.Module, Batch], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """One process, one batch a rank and window; every rank's forward starts from, and only rank 0's is kept in, the
    buffers."""
    mean_loss = loss or (lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
    optimizer = make_optimizer(model.parameters())
    for window in windows:
        optimizer.zero_grad(set_to_none=True)
        count = sum(len(y) for _, y in window)
        before = [buffer.clone() for buffer in model.buffers()]
        after: list[torch.Tensor] = []
        for batch in window:
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.data = value.clone()
            (mean_loss(model, batch) * (len(batch[1]) / count)).backward()
            after = after or [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), after, strict=True):
            buffer.data = value
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_clean(ended: Sequence[Ended], step: int, applied_steps: int | None = None) -> None:
    """All ranks ended well after the same steps, with equal weights."""
    for rank, end in enumerate(ended):
        assert end.error == "", f"rank {rank}: {end.error}: {end.text}"
        assert (end.step, end.applied_steps) == (step, step if applied_steps is None else applied_steps)
    assert_same([end.state for end in ended])


def assert_all_stopped(ended: Sequence[Ended], place: Place, step: int, *words: str) -> None:
    """The culprit failed at ``step``, and every other rank says so: the rank, the step, and these words."""
    assert [end.error for end in ended] == [
        "RankFailed" if rank == place.culprit else "PeerFailed" for rank in range(place.world_size)
    ], [end.text for end in ended]
    for rank, end in enumerate(ended):
        assert end.step == step
        assert f"rank {place.culprit}" in end.text
        for word in words:
            assert word in end.text, f"rank {rank} does not say {word!r}: {end.text}"
        if rank != place.culprit:
            assert end.ranks == (place.culprit,)
