"""Small models, data and reference loops for the tests that run ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import safetrain
from safetrain.pieces import is_shard

FEATURES, CLASSES = 8, 4
Batch = tuple[torch.Tensor, torch.Tensor]

momentum_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def mlp(*, norm: bool = False) -> nn.Sequential:
    """The same weights at every call."""
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(
        nn.Linear(FEATURES, 16), *middle, nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Two blocks; the same weights at every call. Widths that do not divide by the ranks."""

    def __init__(self, width: int = 14) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.blocks = nn.Linear(FEATURES, width), nn.ModuleList([Block(width), Block(width)])
        self.outside = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.outside(x)


def samples(count: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, FEATURES, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


def dataset(count: int) -> TensorDataset:
    return TensorDataset(*samples(count))


class PerRank(IterableDataset[Any]):
    """Gives each rank its own list of ready batches: the test decides who sees what."""

    def __init__(self, batches: Sequence[Sequence[Any]]) -> None:
        self._batches = batches

    def set_shard(self, shard: int, shards: int) -> None:
        assert shards == len(self._batches)
        self._shard = shard

    def __iter__(self) -> Iterator[Any]:
        return _Items(self._batches[self._shard])


class _Items(Iterator[Any]):
    """Raises items that are exceptions, and goes on after that: a generator would be finished."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = iter(items)

    def __next__(self) -> Any:
        item = next(self._items)
        if isinstance(item, Exception):
            raise item
        return item


class Classifier(safetrain.Trainer):
    """Cross entropy on (x, y) batches."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        logits = self.model(x)
        self.log("loss", F.cross_entropy(logits, y, reduction="none"))
        self.log("accuracy", (logits.argmax(1) == y).float())


def ready(batches: Dataset[Any]) -> torch.utils.data.DataLoader[Any]:
    """A loader that passes ready batches on."""
    return torch.utils.data.DataLoader(batches, batch_size=None)


def state(trainer: safetrain.Trainer) -> dict[str, torch.Tensor]:
    """Weights and buffers, detached; gathered where each rank has a shard."""
    tensors = {name: value.detach() for name, value in trainer.model.state_dict().items()}
    return {n: (t.full_tensor() if is_shard(t) else t).clone() for n, t in tensors.items()}


def assert_same(states: Sequence[dict[str, torch.Tensor]]) -> None:
    """Finite, and equal on all ranks to the bit."""
    for rank, other in enumerate(states):
        for name, value in other.items():
            assert value.isfinite().all(), f"rank {rank}: {name} is not finite"
            assert torch.equal(value, states[0][name]), f"rank {rank}: {name} differs from rank 0's"


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        difference = (value - expected[name]).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference:.2e}"


def train_alone(
    model: nn.Module,
    windows: Sequence[Sequence[Batch]],
    make_optimizer: Callable[..., Optimizer] = momentum_sgd,
    clip_norm: float | None = None,
    loss: Callable[[nn.Module, Batch], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """One process, one big batch a window: the mean over all samples of all micro-batches."""
    sum_loss = loss or (lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="sum"))
    optimizer = make_optimizer(model.parameters())
    for micro_batches in windows:
        optimizer.zero_grad(set_to_none=True)
        count = sum(len(y) for _, y in micro_batches)
        for batch in micro_batches:
            (sum_loss(model, batch) / count).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
