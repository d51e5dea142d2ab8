"""HANGS E: parameters that get no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import safetrain
from safetrain.comm import Comm
from safetrain.policies import Policies, UnusedStop
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_all_stopped, assert_clean, batches_of, end_of, feed, windows_of
from tests.ranks.toys import CLASSES, FEATURES, Batch, Classifier, adamw, assert_close, momentum_sgd, train_alone

RIGHT = 0.5


class Branches(nn.Module):
    """Goes left or right by its data; ``idle`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, 16)
        self.left, self.right, self.idle = (nn.Linear(16, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).relu()
        return self.right(hidden) if x[0, 0] == RIGHT else self.left(hidden)


def to_the_right(batch: Batch) -> Batch:
    x, y = batch
    return torch.cat([torch.full((len(x), 1), RIGHT), x[:, 1:]], 1), y


@pytest.mark.parametrize("steps", [1, 5], ids=["one_step", "five_steps"])
@pytest.mark.parametrize(("accumulate", "make_optimizer"), [(1, momentum_sgd), (3, adamw)], ids=["sgd", "3_adamw"])
def test_h36_a_branch_that_only_one_rank_takes(place: Place, steps: int, accumulate: int, make_optimizer: Any) -> None:
    """Reported: weights differ between ranks after a step, without an error. Here they are those of a single process,
    where ``idle``, which no rank used, stays alone: no momentum and no weight decay moves it."""
    batches = batches_of(place.world_size, steps * accumulate)
    for step in (0, 3):
        if step < len(batches[0]):
            batches[place.culprit][step] = to_the_right(batches[place.culprit][step])

    def work(comm: Comm) -> Ended:
        return end_of(
            Classifier(
                Branches(),
                feed(batches),
                optimizer=make_optimizer,
                loop=safetrain.Loop(accumulate=accumulate, nominal_weight=4),
            )
        )

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean(ended, step=steps)
    for rank, end in enumerate(ended):
        assert any(f"rank {rank}, step 0" in line and "idle.weight, idle.bias" in line for line in end.log)
    windows = windows_of(batches, accumulate)
    expected = run_ranks(lambda _: train_alone(Branches(), windows, make_optimizer), 1)[0]
    assert_close(ended[0].state, expected)
    assert torch.equal(ended[0].state["idle.weight"], Branches().idle.weight)


def test_h36_plain_ddp_still_shows_it(world_size: int) -> None:
    """torch 2.13: one step with an unused layer, and the ranks' weights differ without an error."""
    batches = batches_of(world_size, 1)

    def work(comm: Comm) -> torch.Tensor:
        model = Branches()
        ddp = DistributedDataParallel(model, process_group=comm.ddp_group)
        optimizer = momentum_sgd(model.parameters())
        x, y = batches[comm.rank][0]
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        return model.body.weight.detach()

    first, *others = run_ranks(work, world_size, timeout_s=15)
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adamw])
@pytest.mark.parametrize("votes_first", [False, True], ids=["vote_last", "vote_first"])
def test_h36_a_parameter_used_and_then_left_alone_by_all(
    world_size: int, make_optimizer: Any, votes_first: bool
) -> None:
    """Zero is not None: where no rank uses ``right`` any more, a plain loop leaves it, and its momentum, where they
    are."""
    batches = batches_of(world_size, 6)
    for mine in batches:
        mine[0], mine[4] = to_the_right(mine[0]), to_the_right(mine[4])
    batches[0][1] = to_the_right(batches[0][1])

    def work(comm: Comm) -> Ended:
        strategy = safetrain.DDPStrategy(forward_communicates=votes_first)
        return end_of(Classifier(Branches(), feed(batches), optimizer=make_optimizer, strategy=strategy))

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=6)
    expected = run_ranks(lambda _: train_alone(Branches(), windows_of(batches), make_optimizer), 1)[0]
    assert_close(ended[0].state, expected)


def test_h36_unused_stop_ends_at_the_step_itself(place: Place) -> None:
    """Reported: an error one step late, or never. Here policy/unused=error ends all ranks at the step itself."""
    batches = batches_of(place.world_size, 4)
    batches[place.culprit][2] = to_the_right(batches[place.culprit][2])

    def work(comm: Comm) -> Ended:
        model = Branches()
        model.idle.requires_grad_(False)
        model.right.requires_grad_(False)
        return end_of(Classifier(model, feed(batches), optimizer=momentum_sgd, policies=Policies(unused=UnusedStop())))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_all_stopped(ended, place, 2, "no gradient for", "left.weight, left.bias")


class TwoHeads(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, 16)
        self.head_a, self.head_b = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).relu()
        return self.head_a(hidden), self.head_b(hidden)


class HeadA(safetrain.Trainer):
    """The loss uses ``head_a`` alone."""

    def training_step(self, batch: Batch) -> torch.Tensor:
        x, y = batch
        a, _ = self.model(x)
        return F.cross_entropy(a, y)


def sum_loss_of_head_a(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0])[0], batch[1], reduction="sum")


def test_h37_an_output_that_is_not_in_the_loss(place: Place) -> None:
    """Reported: indices instead of names, one step late. Here: the names, the rank, and the step where it happened."""
    batches = batches_of(place.world_size, 4)

    class OneHeadAtStep1(safetrain.Trainer):
        def training_step(self, batch: Batch) -> torch.Tensor:
            x, y = batch
            a, b = self.model(x)
            if self.comm.rank == place.culprit and self.step == 1:
                return F.cross_entropy(a, y)
            return F.cross_entropy(a, y) + F.cross_entropy(b, y)

    def work(comm: Comm) -> Ended:
        policies = Policies(unused=UnusedStop())
        return end_of(OneHeadAtStep1(TwoHeads(), feed(batches), optimizer=momentum_sgd, policies=policies))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_all_stopped(ended, place, 1, "no gradient for head_b.weight, head_b.bias")


def test_h37_by_default_it_trains_on_and_warns_once(world_size: int) -> None:
    """Reported: users turn find_unused_parameters on everywhere. Here nothing needs turning on, and the names are told
    once."""
    batches = batches_of(world_size, 4)

    def work(comm: Comm) -> Ended:
        return end_of(HeadA(TwoHeads(), feed(batches), optimizer=adamw))

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=4)
    for end in ended:
        assert sum("no gradient for head_b.weight, head_b.bias" in line for line in end.log) == 1
    expected = run_ranks(lambda _: train_alone(TwoHeads(), windows_of(batches), adamw, loss=sum_loss_of_head_a), 1)[0]
    assert_close(ended[0].state, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_h43_static_graph_with_an_output_that_is_not_in_the_loss(world_size: int, accumulate: int) -> None:
    """Reported: a changed graph is blamed that did not change. Here it trains, or is refused at the start with the
    names."""
    batches = batches_of(world_size, 4)

    def work(comm: Comm) -> Ended:
        return end_of(
            HeadA(
                TwoHeads(),
                feed(batches),
                optimizer=adamw,
                strategy=safetrain.DDPStrategy(static_graph=True),
                loop=safetrain.Loop(accumulate=accumulate, nominal_weight=4),
            )
        )

    ended = run_ranks(work, world_size, timeout_s=15)
    if all(end.error == "" for end in ended):
        assert_clean(ended, step=4 // accumulate)
        windows = windows_of(batches, accumulate)
        expected = run_ranks(lambda _: train_alone(TwoHeads(), windows, adamw, loss=sum_loss_of_head_a), 1)[0]
        assert_close(ended[0].state, expected)
    else:
        for end in ended:
            assert (end.error, end.step) == ("RankFailed", 0)
            assert "head_b.weight, head_b.bias" in end.text
            assert "static_graph" in end.text
