"""HANGS M: the model beside its wrapper, and the wrapper round itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, assert_clean, batches_of, end_of, feed, windows_of
from tests.ranks.toys import Batch, Classifier, adamw, assert_close, mlp, momentum_sgd, train_alone


class Two(nn.Module):
    """Has a way to its loss that does not lead through ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).tanh()


class ByMethod(safetrain.Trainer):
    def training_step(self, batch: Batch) -> torch.Tensor:
        model: Any = self.model
        return F.cross_entropy(model.score(batch[0]), batch[1])


class BySubmodule(safetrain.Trainer):
    def training_step(self, batch: Batch) -> torch.Tensor:
        model: Any = self.model
        return F.cross_entropy(model.net(batch[0]).tanh(), batch[1])


class ByBoth(safetrain.Trainer):
    def training_step(self, batch: Batch) -> torch.Tensor:
        model: Any = self.model
        model(batch[0])
        return F.cross_entropy(model.score(batch[0]), batch[1])


@pytest.mark.parametrize(("trainer_class", "accumulate"), [(ByMethod, 1), (BySubmodule, 2), (ByBoth, 1)])
def test_h91_the_model_is_called_past_its_forward(
    world_size: int, trainer_class: type[safetrain.Trainer], accumulate: int
) -> None:
    """Reported: ``ddp.module(x)`` trains each rank on its data alone. Here every way through the model is reduced."""
    batches = batches_of(world_size, 4)

    def work(comm: Comm) -> Ended:
        loop = safetrain.Loop(accumulate=accumulate, nominal_weight=4)
        return end_of(trainer_class(Two(), feed(batches), optimizer=adamw, loop=loop))

    def sum_loss(model: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model.score(batch[0]), batch[1], reduction="sum")

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=4 // accumulate)
    expected = run_ranks(lambda _: train_alone(Two(), windows_of(batches, accumulate), adamw, loss=sum_loss), 1)[0]
    assert_close(ended[0].state, expected)


def test_h91_plain_ddp_still_shows_it(world_size: int) -> None:
    """torch 2.13: a forward through ``.module``, and the gradients are this rank's own, without an error."""
    batches = batches_of(world_size, 1)

    def work(comm: Comm) -> torch.Tensor:
        ddp = DistributedDataParallel(mlp(), process_group=comm.ddp_group)
        x, y = batches[comm.rank][0]
        F.cross_entropy(ddp.module(x), y).backward()
        return ddp.module[0].weight.grad

    first, *others = run_ranks(work, world_size, timeout_s=15)
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("inner", [False, True], ids=["whole", "part"])
def test_h93_a_model_that_is_wrapped_already_is_refused(world_size: int, inner: bool) -> None:
    """Reported: wrapping again "kind of works, mostly breaks badly". Here it is refused before the first step."""

    def work(comm: Comm) -> Ended:
        ddp: nn.Module = DistributedDataParallel(mlp(), process_group=comm.ddp_group)
        model = nn.Sequential(ddp) if inner else ddp
        return end_of(Classifier(model, feed(batches_of(world_size, 2)), optimizer=momentum_sgd))

    for end in run_ranks(work, world_size, timeout_s=15):
        assert (end.error, end.step) == ("UsageError", 0)
        assert "already wrapped in DistributedDataParallel: give the bare model" in end.text


def test_h93_the_same_model_is_trained_by_a_second_trainer(world_size: int) -> None:
    """Reported: a second ``train()`` wrapped the wrapped model. Here the second run leaves nothing of the first one's
    wrap."""
    batches = batches_of(world_size, 4)

    def work(comm: Comm) -> list[Ended]:
        model = mlp()
        first = end_of(Classifier(model, feed(batches), optimizer=momentum_sgd))
        second = end_of(Classifier(model, feed(batches), optimizer=adamw))
        assert not any("module." in name for name in model.state_dict())
        return [first, second]

    def alone(_: Comm) -> dict[str, torch.Tensor]:
        model = mlp()
        train_alone(model, windows_of(batches), momentum_sgd)
        return train_alone(model, windows_of(batches), adamw)

    results = run_ranks(work, world_size, timeout_s=15)
    for run in (0, 1):
        assert_clean([ended[run] for ended in results], step=4)
    assert_close(results[0][1].state, run_ranks(alone, 1)[0])


def test_h93_fit_is_called_twice_on_one_trainer(world_size: int) -> None:
    """A second ``fit()`` on the same trainer trains anew from the weights at hand: as many steps, counted from 0."""
    batches = batches_of(world_size, 4)

    def work(comm: Comm) -> list[Ended]:
        trainer = Classifier(mlp(), feed(batches), optimizer=momentum_sgd)
        return [end_of(trainer), end_of(trainer)]

    def alone(_: Comm) -> dict[str, torch.Tensor]:
        model = mlp()
        train_alone(model, windows_of(batches), momentum_sgd)
        return train_alone(model, windows_of(batches), momentum_sgd)

    results = run_ranks(work, world_size, timeout_s=15)
    for run in (0, 1):
        assert_clean([ended[run] for ended in results], step=4)
    assert_close(results[0][1].state, run_ranks(alone, 1)[0])
