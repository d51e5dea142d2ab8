"""safetrain.tune on ranks: every way takes its turns on the user's own trainer, and what is refused is told."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import safetrain
from safetrain.comm import Comm
from safetrain.overlap import Overlap, TimedDDP, TimedReduction
from safetrain.strategy import DDPStrategy
from safetrain.testing import differences, run_ranks
from safetrain.tune_config import Tune
from safetrain.tuning import Tuned, tune
from tests.ranks.toys import CLASSES, FEATURES, dataset, mlp, momentum_sgd, state

OPTIONS = Tune(steps=2, warmup_steps=2, rounds=6)


class Counting(safetrain.Trainer):
    """Counts the steps that it was asked for, and the data sets that it built."""

    counted: ClassVar[Counter[str]] = Counter()

    def build_model(self) -> Any:
        return mlp()

    def build_train_data(self) -> Any:
        self.counted["data sets"] += 1
        return super().build_train_data()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.counted[f"{self.strategy.comm_hook}"] += 1
        samples, labels = batch
        return F.cross_entropy(self.model(samples), labels)


def _tune(comm: Comm, accumulate: int) -> tuple[Tuned, Counter[str]]:
    trainer = Counting(
        mlp(), dataset(48), optimizer=momentum_sgd, loader=safetrain.Loader(batch_size=2),
        loop=safetrain.Loop(accumulate=accumulate, epochs=3), device="cpu",
    )  # fmt: skip
    return tune(trainer, OPTIONS), trainer.counted


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (4, 3)])
def test_every_way_takes_its_turns_on_every_rank(ranks: int, accumulate: int) -> None:
    for found, counted in run_ranks(_tune, ranks, accumulate, timeout_s=100):
        assert [one.keys for one in found.tried] == [
            "", "strategy.gradient_as_bucket_view=false", "strategy.static_graph=true", "strategy.comm_hook=fp16",
        ]  # fmt: skip
        tried = [*found.tried, *filter(None, [found.again])]
        assert all(len(one.ratios) == 6 and not one.refused for one in tried)
        assert found.tried[0].ratios == [1.0] * 6
        assert list(found.overlaps) == ["", *filter(None, [found.again and found.again.keys])]
        assert len(found.overlaps[""].buckets) == 1
        turns = 1 + 6 * 4 + 6 * 2 * (found.again is not None) + len(found.overlaps)
        steps = {hook: calls / accumulate / 4 for hook, calls in counted.items() if hook != "data sets"}
        assert steps["fp16"] == (12 if found.again and "comm_hook" in found.again.keys else 6)
        assert sum(steps.values()) == turns, "4 steps a turn, no more"
        assert counted["data sets"] == 1


class Wide(safetrain.Trainer):
    """Three buckets of DDP: a layer of 600 x 600 has 1.4 MiB."""

    def build_model(self) -> Any:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(600, 600) for _ in range(3)]
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 600), *layers, torch.nn.Linear(600, CLASSES))

    def training_step(self, batch: Any) -> torch.Tensor:
        samples, labels = batch
        return F.cross_entropy(self.model(samples), labels)


def _look(comm: Comm) -> tuple[Overlap, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    ends = []
    for strategy in (DDPStrategy(bucket_cap_mb=1), TimedDDP(bucket_cap_mb=1)):
        trainer = Wide(
            train_data=dataset(32), optimizer=momentum_sgd, strategy=strategy, device="cpu",
            loader=safetrain.Loader(batch_size=2),
        )  # fmt: skip
        trainer.fit()
        ends.append(state(trainer))
    reduction = trainer._run.reduction
    assert isinstance(reduction, TimedReduction)
    return reduction.times.overlap(first=2), *ends


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_bucket_is_looked_at_and_nothing_else_changes(ranks: int) -> None:
    found = run_ranks(_look, ranks)
    for overlap, plain, timed in (found[0], found[-1]):
        sizes = [one.size_bytes for one in overlap.buckets]
        with_ballot = sum(value.nbytes for value in plain.values())
        assert len(sizes) >= 3
        assert 0 < sum(sizes) - with_ballot < 200, "all gradients, and the ballot"
        assert all(one.reduce_s > 0 and 0 <= one.hidden <= 1 for one in overlap.buckets)
        assert overlap.buckets[-1].exposed_s > 0, "the last one ends after backward: the ballot is in it"
        assert overlap.exposed_s > 0
        assert differences(timed, plain) == []
