"""What safetrain trains is what a plain loop trains: to the bit where that can be promised, else to 1e-6."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.toys import (
    FEATURES,
    Batch,
    Classifier,
    PerRank,
    adamw,
    assert_close,
    assert_same,
    dataset,
    mlp,
    momentum_sgd,
    ready,
    samples,
    state,
    train_alone,
)


def hand_written(
    comm: Comm, steps: int, accumulate: int, clip_norm: float | None, order: list[list[int]]
) -> dict[str, torch.Tensor]:
    """The DDP loop of the tutorials."""
    data = dataset(512)
    model = mlp()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, process_group=comm.ddp_group)
    optimizer = momentum_sgd(model.parameters())
    batches = iter(order)
    for _ in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            indices = next(batches)
            x, y = data.tensors[0][indices], data.tensors[1][indices]
            if micro < accumulate - 1:
                with ddp.no_sync():
                    (F.cross_entropy(ddp(x), y) / accumulate).backward()
            elif accumulate > 1:
                (F.cross_entropy(ddp(x), y) / accumulate).backward()
            else:
                F.cross_entropy(ddp(x), y).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def indices_of(comm: Comm, count: int, batches: int) -> list[list[int]]:
    """A fixed order, the same for both loops."""
    per_rank = torch.randperm(512, generator=torch.Generator().manual_seed(3)).repeat(8)[comm.rank :: comm.world_size]
    return [per_rank[i * count : (i + 1) * count].tolist() for i in range(batches)]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_two_ranks_are_bit_equal_to_a_hand_written_ddp_loop(accumulate: int, clip_norm: float | None) -> None:
    def work(comm: Comm) -> bool:
        order = indices_of(comm, 8, 20 * accumulate)
        expected = hand_written(comm, 20, accumulate, clip_norm, order)
        data = dataset(512)
        trainer = Classifier(
            mlp(),
            ready(PerRank([[(data.tensors[0][i], data.tensors[1][i]) for i in order]] * comm.world_size)),
            optimizer=momentum_sgd,
            loop=safetrain.Loop(max_steps=20, accumulate=accumulate, clip_norm=clip_norm, nominal_weight=8),
        )
        assert trainer.fit().applied_steps == 20
        return all(torch.equal(value, expected[name]) for name, value in state(trainer).items())

    assert run_ranks(work, 2) == [True, True]


def test_the_sampler_feeds_what_torchs_distributed_sampler_feeds() -> None:
    def work(comm: Comm) -> bool:
        data = dataset(100)
        sampler = DistributedSampler(data, comm.world_size, comm.rank, shuffle=True, seed=7, drop_last=True)
        seen: list[torch.Tensor] = []

        class Recorder(Classifier):
            def training_step(self, batch: Batch) -> torch.Tensor:
                seen.append(batch[1])
                return super().training_step(batch)

        Recorder(
            mlp(),
            DataLoader(data, batch_size=10, sampler=sampler),
            optimizer=momentum_sgd,
            loop=safetrain.Loop(epochs=2),
        ).fit()
        expected = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            expected += [y for _, y in DataLoader(data, batch_size=10, sampler=sampler)]
        return len(seen) == len(expected) and all(map(torch.equal, seen, expected))

    assert all(run_ranks(work, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adamw])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_any_number_of_ranks_equals_one_process_on_the_joined_batch(
    world_size: int, make_optimizer: partial[torch.optim.Optimizer], accumulate: int
) -> None:
    """Unequal batch sizes, and a last window that is short: every sample counts alike."""
    sizes = [[[4, 7, 1, 5][(step + 2 * rank) % 4] for step in range(10)] for rank in range(world_size)]
    batches = [
        [samples(size, seed=100 * rank + step) for step, size in enumerate(of_rank)]
        for rank, of_rank in enumerate(sizes)
    ]

    def work(comm: Comm) -> dict[str, torch.Tensor]:
        trainer = Classifier(
            mlp(),
            ready(PerRank(batches)),
            optimizer=make_optimizer,
            loop=safetrain.Loop(accumulate=accumulate, clip_norm=1.0, nominal_weight=4),
        )
        assert trainer.fit().applied_steps == -(-10 // accumulate)
        return state(trainer)

    windows = [
        [batches[rank][step] for rank in range(world_size) for step in range(10)[start : start + accumulate]]
        for start in range(0, 10, accumulate)
    ]
    states = run_ranks(work, world_size)
    assert_same(states)
    assert_close(states[-1], train_alone(mlp(), windows, make_optimizer, clip_norm=1.0))


@pytest.mark.parametrize("world_size", [2, 4])
def test_token_weights_are_exact(world_size: int) -> None:
    """The loss is a mean over real tokens, of which every micro-batch has another number; some have none."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(world_size):
        mine = []
        for _ in range(6):
            x, y = torch.randn(12, FEATURES, generator=generator), torch.randint(0, 4, (12,), generator=generator)
            y[torch.rand(12, generator=generator) < 0.4] = -100
            mine.append((x, y))
        mine[3][1].fill_(-100)
        batches.append(mine)
    batches[-1][4][1].fill_(-100)

    class Tokens(safetrain.Trainer):
        def training_step(self, batch: Batch) -> safetrain.Loss:
            x, y = batch
            return safetrain.Loss(F.cross_entropy(self.model(x), y), weight=(y != -100).sum())

    def work(comm: Comm) -> dict[str, torch.Tensor]:
        trainer = Tokens(
            mlp(), ready(PerRank(batches)), optimizer=adamw, loop=safetrain.Loop(accumulate=2, nominal_weight=8)
        )
        trainer.fit()
        return state(trainer)

    windows = []
    for start in (0, 2, 4):
        joined = [batches[rank][step] for rank in range(world_size) for step in (start, start + 1)]
        windows.append([(x[y != -100], y[y != -100]) for x, y in joined])
    states = run_ranks(work, world_size)
    assert_same(states)
    assert_close(states[-1], train_alone(mlp(), windows, adamw))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_evaluation_of_25_samples_equals_one_process_to_the_last_digit(world_size: int) -> None:
    model = mlp().eval()
    x, y = samples(25, seed=1)
    with torch.no_grad():
        per_sample = torch.cat(
            [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1], reduction="none") for i in range(25)]
        )
    right = sum(int(model(x[i : i + 1]).argmax() == y[i]) for i in range(25))

    def work(comm: Comm) -> dict[str, float]:
        trainer = Classifier(
            mlp(),
            dataset(8),
            dataset(25),
            optimizer=partial(torch.optim.SGD, lr=0.0),
            loader=safetrain.Loader(batch_size=1),
        )
        return dict(trainer.fit().metrics)

    for metrics in run_ranks(work, world_size):
        assert metrics["val/accuracy"] == right / 25
        assert metrics["val/loss"] == math.fsum(per_sample.tolist()) / 25
