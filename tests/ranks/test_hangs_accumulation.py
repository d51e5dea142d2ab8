"""HANGS F: which micro-batch is reduced, and how the last, partial window counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import safetrain
from safetrain.comm import Comm
from safetrain.policies import Policies, UnevenContinue
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_all_stopped, assert_clean, batches_of, end_of, feed, windows_of
from tests.ranks.toys import Batch, Classifier, adamw, assert_close, mlp, momentum_sgd, train_alone


def gradients_alone(windows: list[list[Batch]]) -> list[list[torch.Tensor]]:
    """The gradients that one process steps on, window by window."""
    model, seen = mlp(), list[list[torch.Tensor]]()
    optimizer = momentum_sgd(model.parameters())
    for window in windows:
        optimizer.zero_grad()
        losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in window]
        (torch.stack(losses).sum() / sum(len(y) for _, y in window)).backward()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return seen


@pytest.mark.parametrize("accumulate", [2, 3])
def test_h48_the_gradients_of_a_step_are_those_of_all_its_micro_batches(world_size: int, accumulate: int) -> None:
    """Reported: an off-by-one reduced the first micro-batch and stepped on the second. Here, just before each step,
    every rank holds the mean over all micro-batches of all ranks."""
    batches = batches_of(world_size, 3 * accumulate)

    class Looks(Classifier):
        def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
            optimizers = super().build_optimizers()
            self.seen: list[list[torch.Tensor]] = []
            for optimizer in optimizers.values():
                optimizer.register_step_pre_hook(
                    lambda *_: self.seen.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
                )
            return optimizers

    def work(comm: Comm) -> list[list[torch.Tensor]]:
        loop = safetrain.Loop(accumulate=accumulate, nominal_weight=4)
        trainer = Looks(mlp(), feed(batches), optimizer=momentum_sgd, loop=loop)
        trainer.fit()
        return trainer.seen

    seen = run_ranks(work, world_size, timeout_s=15)
    expected = run_ranks(lambda _: gradients_alone(windows_of(batches, accumulate)), 1)[0]
    assert [len(of_rank) for of_rank in seen] == [3] * world_size
    for of_rank in seen:
        for step, (gradients, right) in enumerate(zip(of_rank, expected, strict=True)):
            for mine, first, one in zip(gradients, seen[0][step], right, strict=True):
                assert torch.equal(mine, first)
                assert torch.allclose(mine, one, atol=1e-6, rtol=0)


def test_h49_plain_ddp_still_shows_it(world_size: int) -> None:
    """torch 2.13: no_sync round backward alone does not hold reduction back, as DDP decides in forward."""
    batches = batches_of(world_size, 1)

    def work(comm: Comm) -> torch.Tensor:
        ddp = DistributedDataParallel(mlp(), process_group=comm.ddp_group)
        x, y = batches[comm.rank][0]
        loss = F.cross_entropy(ddp(x), y)
        with ddp.no_sync():
            loss.backward()
        return ddp.module[0].weight.grad

    first, *others = run_ranks(work, world_size, timeout_s=15)
    assert all(torch.equal(first, other) for other in others)  # reduced, although no_sync was asked for


@pytest.mark.parametrize("accumulate", [1, 2])
def test_h49_several_forwards_are_in_flight(world_size: int, accumulate: int) -> None:
    """Reported: the last forward arms the reducer, an earlier backward consumes it. Here a step has one reduction,
    whatever forwards it made, in whatever order their losses go backward."""
    batches = batches_of(world_size, 2 * accumulate)

    def two_losses(model: Any, batch: Batch) -> torch.Tensor:
        x, y = batch
        first = F.cross_entropy(model(x), y)
        with torch.no_grad():
            model(x)
        second = F.cross_entropy(model(x * 0.5), y)
        return second + first

    class InFlight(safetrain.Trainer):
        def training_step(self, batch: Batch) -> torch.Tensor:
            return two_losses(self.model, batch)

    def work(comm: Comm) -> Ended:
        loop = safetrain.Loop(accumulate=accumulate, nominal_weight=4)
        return end_of(InFlight(mlp(), feed(batches), optimizer=adamw, loop=loop))

    def sum_loss(model: Any, batch: Batch) -> torch.Tensor:
        return two_losses(model, batch) * len(batch[1])

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=2)
    expected = run_ranks(lambda _: train_alone(mlp(), windows_of(batches, accumulate), adamw, loss=sum_loss), 1)[0]
    assert_close(ended[0].state, expected)


@pytest.mark.parametrize(("accumulate", "returns"), [(1, "none"), (2, "detached"), (1, "second_loss")])
def test_h49_a_backward_inside_the_step(place: Place, accumulate: int, returns: str) -> None:
    """A backward of the user's own comes before DDP expects gradients, and would stay on this rank. Here all ranks
    stop, told why."""
    batches = batches_of(place.world_size, 3 * accumulate)

    class Own(Classifier):
        def training_step(self, batch: Batch) -> Any:
            loss = super().training_step(batch)
            if self.comm.rank == place.culprit and self.step == 1:
                loss.backward()
                return {"none": None, "detached": loss.detach(), "second_loss": super().training_step(batch)}[returns]
            return loss

    def work(comm: Comm) -> Ended:
        loop = safetrain.Loop(accumulate=accumulate, nominal_weight=4)
        return end_of(Own(mlp(), feed(batches), optimizer=momentum_sgd, loop=loop))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_all_stopped(ended, place, 1, "backward", "return the loss")


@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adamw])
def test_h50_the_last_window_is_partial(world_size: int, make_optimizer: Any) -> None:
    """Reported: one micro-batch at the end gets a full step, or none, or is never reduced. Here it is a step on the
    exact mean."""
    batches = batches_of(world_size, 5)

    def work(comm: Comm) -> Ended:
        loop = safetrain.Loop(accumulate=2, nominal_weight=4, epochs=2)
        return end_of(Classifier(mlp(), feed(batches), optimizer=make_optimizer, loop=loop))

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=6)
    windows = windows_of(batches, 2) * 2
    assert_close(ended[0].state, run_ranks(lambda _: train_alone(mlp(), windows, make_optimizer), 1)[0])


def test_h50_the_last_window_is_partial_on_one_rank(place: Place) -> None:
    """The same where one rank alone comes short in the last window: every sample counts alike."""
    counts = [3 if rank == place.culprit else 4 for rank in range(place.world_size)]
    batches = batches_of(place.world_size, counts)

    def work(comm: Comm) -> Ended:
        loop = safetrain.Loop(accumulate=2, nominal_weight=4)
        policies = Policies(uneven=UnevenContinue())
        return end_of(Classifier(mlp(), feed(batches), optimizer=adamw, loop=loop, policies=policies))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean(ended, step=2)
    assert_close(ended[0].state, run_ranks(lambda _: train_alone(mlp(), windows_of(batches, 2), adamw), 1)[0])
