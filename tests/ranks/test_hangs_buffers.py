"""HANGS E, H: buffers, which DDP copies from rank 0 before a forward, and which differ between ranks after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_clean, batches_of, end_of, feed, train_like_ddp, windows_of
from tests.ranks.toys import CLASSES, FEATURES, Batch, Classifier, adamw, assert_close, momentum_sgd, samples


class Scaled(nn.Module):
    """Multiplies by a buffer, which autograd therefore saves."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((16,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def with_buffers() -> nn.Sequential:
    """Without a kink: a ReLU whose input comes within rounding of 0 sends its gradient elsewhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16),
        nn.Tanh(),
        nn.BatchNorm1d(16),
        Scaled(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, CLASSES),
    )


def two_forwards(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(1)), y)


@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adamw])
def test_h47_two_forwards_before_one_backward(world_size: int, make_optimizer: Any) -> None:
    """Reported: the second forward overwrites buffers that the first one's backward needs. Here there is one broadcast
    a window."""
    batches = batches_of(world_size, 4)

    class Twice(safetrain.Trainer):
        def training_step(self, batch: Batch) -> torch.Tensor:
            return two_forwards(self.model, batch)

    def work(comm: Comm) -> Ended:
        return end_of(Twice(with_buffers(), feed(batches), optimizer=make_optimizer))

    ended = run_ranks(work, world_size, timeout_s=15)
    assert [end.error for end in ended] == [""] * world_size
    expected = run_ranks(
        lambda _: train_like_ddp(with_buffers(), windows_of(batches), make_optimizer, loss=two_forwards), 1
    )[0]
    assert_close(ended[0].state, expected, tolerance=5e-6)  # AdamW divides by small gradients: their rounding shows


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_h59_running_statistics_are_one_for_all_ranks_when_they_are_used(
    world_size: int, broadcast_buffers: bool
) -> None:
    """Reported: the same image gives other outputs on other ranks. Here validation, and what ``fit()`` leaves, is rank
    0's."""
    batches = batches_of(world_size, 3)
    x, _ = samples(5)
    outputs: list[torch.Tensor] = []

    class Probes(Classifier):
        def validation_step(self, batch: Batch) -> None:
            outputs.append(self.model(x))

    def work(comm: Comm) -> tuple[Ended, list[torch.Tensor], torch.Tensor]:
        trainer = Probes(
            with_buffers(),
            feed(batches),
            feed(batches_of(world_size, 1)),
            optimizer=momentum_sgd,
            strategy=safetrain.DDPStrategy(broadcast_buffers=broadcast_buffers),
            loop=safetrain.Loop(epochs=3, validate_every_epochs=2),
        )
        end = end_of(trainer)
        with torch.no_grad():
            return end, outputs, trainer.model.eval()(x)

    results = run_ranks(work, world_size, timeout_s=15)
    for _, validated, _ in results:
        assert len(validated) == 2  # after the second epoch, and the last
        assert all(torch.equal(one, first) for one, first in zip(validated, results[0][1], strict=True))
    assert_clean([end for end, _, _ in results], step=9)
    if broadcast_buffers:
        expected = run_ranks(lambda _: train_like_ddp(with_buffers(), windows_of(batches) * 3, momentum_sgd), 1)[0]
        assert_close(results[0][0].state, expected)
    for _, _, after in results:
        assert torch.equal(after, results[0][2])


def test_h59_a_window_that_is_dropped_leaves_the_statistics_alone(place: Place) -> None:
    """A NaN batch on one rank: the step is dropped, and no running mean keeps the NaN, on any rank."""
    batches = batches_of(place.world_size, 5)
    x, y = batches[place.culprit][2]
    batches[place.culprit][2] = (torch.full_like(x, torch.nan), y)

    def work(comm: Comm) -> Ended:
        return end_of(Classifier(with_buffers(), feed(batches), optimizer=adamw))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert [(end.error, end.step, end.applied_steps) for end in ended] == [("", 5, 4)] * place.world_size
    windows = windows_of(batches)
    del windows[2]
    expected = run_ranks(lambda _: train_like_ddp(with_buffers(), windows, adamw), 1)[0]
    assert_close(ended[0].state, expected)
    for end in ended:
        assert all(value.isfinite().all() for value in end.state.values())
