"""safetrain.tune on ranks: every way takes its turns on the user's own trainer, and what is refused is told."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from safetrain.tune_config import Tune
from safetrain.tuning import Tried, tune
from tests.ranks.toys import dataset, mlp, momentum_sgd

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


def _tune(comm: Comm, accumulate: int) -> tuple[list[Tried], Counter[str]]:
    trainer = Counting(
        mlp(), dataset(48), optimizer=momentum_sgd, loader=safetrain.Loader(batch_size=2),
        loop=safetrain.Loop(accumulate=accumulate, epochs=3), device="cpu",
    )  # fmt: skip
    return tune(trainer, OPTIONS), trainer.counted


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (4, 3)])
def test_every_way_takes_its_turns_on_every_rank(ranks: int, accumulate: int) -> None:
    for tried, counted in run_ranks(_tune, ranks, accumulate, timeout_s=100):
        singles = [one for one in tried if " " not in one.keys]
        assert [one.keys for one in singles] == [
            "", "strategy.gradient_as_bucket_view=false", "strategy.static_graph=true", "strategy.comm_hook=fp16",
        ]  # fmt: skip
        assert all(len(one.ratios) == 6 and not one.refused for one in tried)
        assert singles[0].ratios == [1.0] * 6
        turns = 1 + 6 * (len(singles) - 1 + 2 * (len(tried) > len(singles)))
        steps_with_hook = counted["fp16"] / accumulate / 4
        assert counted["data sets"] == 1
        assert steps_with_hook >= 6
        assert steps_with_hook + counted["None"] / accumulate / 4 == turns + 6, "4 steps a turn, no more"
