"""HANGS E: parameters that are moved, frozen, unfrozen or replaced after the wrap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_all_stopped, assert_clean, batches_of, end_of, feed, windows_of
from tests.ranks.toys import CLASSES, FEATURES, Batch, Classifier, adamw, assert_close, mlp, momentum_sgd, train_alone


class Backbone(nn.Module):
    """A body that fine-tuning keeps frozen at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


def train_in_epochs(
    batches: list[list[Batch]], epochs: list[dict[str, bool]], make_optimizer: Any
) -> dict[str, torch.Tensor]:
    """One process; each epoch says which parts train."""
    model = Backbone()
    optimizer = make_optimizer(model.parameters())
    for trained in epochs:
        for part, trains in trained.items():
            model.get_submodule(part).requires_grad_(trains)
        for window in windows_of(batches):
            optimizer.zero_grad()
            losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in window]
            (torch.stack(losses).sum() / sum(len(y) for _, y in window)).backward()
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


class Converts(Classifier):
    """Converts its model to and fro before the second epoch."""

    def on_epoch_start(self) -> None:
        if self.epoch == 1 and self.comm.rank in self.converting:
            self.model.double().float()

    converting: list[int]


def test_h40_the_model_is_converted_and_back_after_the_wrap(world_size: int) -> None:
    """Reported (.cpu() and .cuda()): training goes on "on a single device", without a word. Here DDP is built anew."""
    batches = batches_of(world_size, 3)

    def work(comm: Comm) -> Ended:
        trainer = Converts(mlp(), feed(batches), optimizer=adamw, loop=safetrain.Loop(epochs=3))
        trainer.converting = list(range(world_size))
        return end_of(trainer)

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=9)
    assert_close(ended[0].state, run_ranks(lambda _: train_alone(mlp(), windows_of(batches) * 3, adamw), 1)[0])


def test_h40_the_model_is_converted_and_back_on_one_rank(place: Place) -> None:
    """The same on one rank only: all ranks stop at that step, and all name that rank."""
    batches = batches_of(place.world_size, 3)

    def work(comm: Comm) -> Ended:
        trainer = Converts(mlp(), feed(batches), optimizer=adamw, loop=safetrain.Loop(epochs=3))
        trainer.converting = [place.culprit]
        return end_of(trainer)

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_all_stopped(ended, place, 3, "not on all ranks")


@pytest.mark.parametrize("epoch", [0, 1])
def test_h40_the_model_stays_converted_on_one_rank(place: Place, epoch: int) -> None:
    """A model that is left in another dtype: all ranks stop, with the rank, the parameter and what to do."""
    batches = batches_of(place.world_size, 3)

    class Doubles(Classifier):
        def on_epoch_start(self) -> None:
            if self.epoch == epoch and self.comm.rank == place.culprit:
                self.model.double()

    def work(comm: Comm) -> Ended:
        return end_of(Doubles(mlp(norm=True), feed(batches), optimizer=adamw, loop=safetrain.Loop(epochs=2)))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_all_stopped(ended, place, 3 * epoch, "0.weight", "torch.float64", "before fit()")


class FineTunes(Classifier):
    """``trained`` says, for each epoch, which parts train; ``apart`` which ranks do not follow."""

    trained: list[dict[str, bool]]
    apart: tuple[int, ...] = ()

    def on_epoch_start(self) -> None:
        if self.comm.rank in self.apart and self.epoch > 0:
            return
        for part, trains in self.trained[self.epoch].items():
            self.model.get_submodule(part).requires_grad_(trains)


SCHEDULES = {
    "unfreezes": [{"body": False}, {"body": True}, {}],
    "freezes": [{}, {"body": False}, {"body": True}],
    "swaps": [{"body": False}, {"body": True, "head": False}, {"head": True}],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adamw])
def test_h41_parameters_are_frozen_and_unfrozen_between_epochs(
    world_size: int, schedule: str, make_optimizer: Any
) -> None:
    """Reported: what was frozen at the wrap trains on local gradients later, in silence. Here it trains as in one
    process."""
    batches, trained = batches_of(world_size, 3), SCHEDULES[schedule]

    def work(comm: Comm) -> Ended:
        trainer = FineTunes(Backbone(), feed(batches), optimizer=make_optimizer, loop=safetrain.Loop(epochs=3))
        trainer.trained = trained
        return end_of(trainer)

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=9)
    assert_close(ended[0].state, run_ranks(lambda _: train_in_epochs(batches, trained, make_optimizer), 1)[0])


@pytest.mark.parametrize(
    ("schedule", "votes_first"), [("unfreezes", False), ("freezes", True)], ids=["vote_last", "vote_first"]
)
def test_h41_parameters_are_unfrozen_on_all_ranks_but_one(place: Place, schedule: str, votes_first: bool) -> None:
    """A schedule that one rank alone follows (or misses): all ranks stop at that step, naming the ranks that differ."""
    batches = batches_of(place.world_size, 3)

    def work(comm: Comm) -> Ended:
        trainer = FineTunes(
            Backbone(),
            feed(batches),
            optimizer=momentum_sgd,
            loop=safetrain.Loop(epochs=3),
            strategy=safetrain.DDPStrategy(forward_communicates=votes_first),
        )
        trainer.trained = SCHEDULES[schedule]
        trainer.apart = tuple(place.victims)
        return end_of(trainer)

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_all_stopped(ended, place, 3, "not on all ranks", "body.weight")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_h41_a_parameter_is_frozen_inside_a_step(world_size: int, accumulate: int) -> None:
    """Frozen between forward and backward of a window: that window completes, and from the next on it stays where it
    is."""
    batches = batches_of(world_size, 4 * accumulate)

    class FreezesInside(Classifier):
        def training_step(self, batch: Batch) -> torch.Tensor:
            if self.step == 2:
                self.model.get_submodule("body").requires_grad_(False)
            return super().training_step(batch)

    def work(comm: Comm) -> Ended:
        loop = safetrain.Loop(accumulate=accumulate, nominal_weight=4)
        return end_of(FreezesInside(Backbone(), feed(batches), optimizer=momentum_sgd, loop=loop))

    def alone(_: Comm) -> dict[str, torch.Tensor]:
        model = Backbone()
        optimizer = momentum_sgd(model.parameters())
        for step, window in enumerate(windows_of(batches, accumulate)):
            if step == 2:
                model.body.requires_grad_(False)
            optimizer.zero_grad()
            losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in window]
            (torch.stack(losses).sum() / sum(len(y) for _, y in window)).backward()
            optimizer.step()
        return {name: value.detach() for name, value in model.state_dict().items()}

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=4)
    assert_close(ended[0].state, run_ranks(alone, 1)[0])


def test_h41_an_unfrozen_parameter_that_no_optimizer_holds_is_refused(world_size: int) -> None:
    """Reported: "add it to the optimizer" was forgotten. Here an unfrozen parameter that nothing would move is refused
    by name."""
    batches = batches_of(world_size, 2)

    class HeadOnly(FineTunes):
        def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
            return {"optimizer": momentum_sgd(self.model.get_submodule("head").parameters())}

        def build_model(self) -> nn.Module:
            model = Backbone()
            model.body.requires_grad_(False)
            return model

    def work(comm: Comm) -> Ended:
        trainer = HeadOnly(None, feed(batches), loop=safetrain.Loop(epochs=3))
        trainer.trained = SCHEDULES["unfreezes"]
        return end_of(trainer)

    for end in run_ranks(work, world_size, timeout_s=15):
        assert (end.error, end.step) == ("UsageError", 2), end
        assert "in no optimizer: body.weight, body.bias" in end.text
