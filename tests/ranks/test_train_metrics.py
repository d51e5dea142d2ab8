"""What a run tells of its training: means over all samples of all ranks, and of nothing that was dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler

import safetrain
from safetrain.comm import Comm
from safetrain.policies import Policies, SkipPartial
from safetrain.testing import run_ranks
from tests.ranks.toys import Classifier, PerRank, dataset, mlp, momentum_sgd, ready, samples


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[safetrain.Event] = []
        self.calls: list[str] = []

    def start(self, run: safetrain.RunInfo) -> None:
        self.calls.append("start")

    def step(self, step: int, epoch: int) -> None:
        self.calls.append(f"step {step}")

    def event(self, event: safetrain.Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.calls.append("close")


class Logs(Classifier):
    def training_step(self, batch: Any) -> Any:
        x, y, fault = batch
        if fault:
            return None
        self.log("first", float(y[0]))
        if self.comm.rank == 0 and self.step == 3:
            self.log("only_here", 7.0)
        return F.cross_entropy(self.model(x), y)


@pytest.mark.parametrize("policies", [None, Policies(skip=SkipPartial())], ids=["any", "partial"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_training_log_is_exact_over_ranks(world_size: int, policies: Policies | None) -> None:
    """Unequal batches, a skip on the last rank, a name that one rank alone logs: no hang, no average of averages."""
    sizes = [[3, 8, 5, 1], [4, 1, 6, 2]]
    batches = [
        [
            (*samples(sizes[rank % 2][step], seed=10 * rank + step), rank == world_size - 1 and step == 1)
            for step in range(4)
        ]
        for rank in range(world_size)
    ]

    def work(comm: Comm) -> Any:
        recorder = Recorder()
        Logs(
            mlp(),
            ready(PerRank(batches)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            policies=policies,
            loop=safetrain.Loop(log_every_steps=2, nominal_weight=4),
            observers=[recorder],
        ).fit()
        return recorder

    trained = [step for step in range(4) if policies is not None or step != 1]
    for recorder in run_ranks(work, world_size):
        train = [event for event in recorder.events if event.kind == "train"]
        assert [event.step for event in train] == [2, 4]
        for event, steps in zip(train, ([0, 1], [2, 3]), strict=True):
            used = [mine[step][:2] for mine in batches for step in steps if step in trained and not mine[step][2]]
            count = sum(len(y) for _, y in used)
            loss = sum(F.cross_entropy(mlp()(x), y).item() * len(y) for x, y in used) / count
            assert event.metrics["train/loss"] == pytest.approx(loss, rel=1e-6)
        logged = [mine[step][1] for mine in batches for step in (2, 3)]
        first = sum(float(y[0]) * len(y) for y in logged) / sum(map(len, logged))
        assert train[1].metrics["train/first"] == pytest.approx(first, rel=1e-12)
        assert train[1].metrics["train/only_here"] == 7.0
        skips = [event for event in recorder.events if event.kind == "skip"]
        if policies is None:
            assert [(event.step, event.text) for event in skips] == [(1, f"skip (rank {world_size - 1})")]
            assert train[1].metrics["train/skipped_steps"] == 1
        else:
            assert skips == []
        assert recorder.calls == ["start", "step 1", "step 2", "step 3", "step 4", "close"]


class OwnOrder(Sampler[int]):
    """Knows no ranks, and shuffles with a generator that nobody seeded alike."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __iter__(self) -> Any:
        return iter(torch.randperm(32, generator=torch.Generator().manual_seed(self._rank)).tolist())

    def __len__(self) -> int:
        return 32


def test_a_sampler_that_shuffles_differently_on_each_rank_is_refused() -> None:
    def work(comm: Comm) -> str:
        loader = DataLoader(dataset(32), batch_size=4, sampler=OwnOrder(comm.rank))
        with pytest.raises(safetrain.DataError) as caught:
            Classifier(mlp(), loader, optimizer=momentum_sgd).fit()
        return str(caught.value)

    for text in run_ranks(work, 2):
        assert text.startswith("epoch 0: the training sampler gives each rank another order")
