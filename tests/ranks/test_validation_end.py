"""``on_validation_end``: all ranks come to it together, however many batches each had; an error in it ends them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_all_stopped, end_of
from tests.ranks.toys import Classifier, assert_same, dataset, mlp, momentum_sgd, state


class Counts(Classifier):
    """Counts its own samples, and sums them over ranks by a collective of its own."""

    culprit = -1

    def on_epoch_start(self) -> None:
        self.seen = 0

    def validation_step(self, batch: Any) -> None:
        super().validation_step(batch)
        self.seen += len(batch[1])

    def on_validation_end(self) -> None:
        if self.comm.rank == self.culprit:
            raise ValueError("no such class")
        total = torch.tensor([self.seen])
        dist.all_reduce(total)
        self.log("seen", total)
        self.log("training", float(self.model.training or torch.is_grad_enabled()), how="max")
        self.log("calls", 1, how="sum")


def trainer_of(world_size: int, val_samples: int, **options: Any) -> Counts:
    return Counts(
        mlp(norm=True), dataset(16 * world_size), dataset(val_samples), optimizer=momentum_sgd,
        loader=safetrain.Loader(batch_size=4), loop=safetrain.Loop(epochs=2), **options,
    )  # fmt: skip


@pytest.mark.parametrize("forward_communicates", [False, True])
@pytest.mark.parametrize(("world_size", "val_samples"), [(2, 13), (4, 33), (4, 5)])
def test_all_ranks_come_to_it_after_uneven_shares(
    world_size: int, val_samples: int, forward_communicates: bool
) -> None:
    def work(comm: Comm) -> Any:
        strategy = safetrain.DDPStrategy(forward_communicates=forward_communicates)
        trainer = trainer_of(world_size, val_samples, strategy=strategy)
        metrics = trainer.fit().metrics
        return metrics, state(trainer), trainer.seen

    runs = run_ranks(work, world_size)
    assert_same([weights for _, weights, _ in runs])
    if not forward_communicates:  # there, who is through repeats its last batch, and a metric of its own must mind
        assert sorted({seen for _, _, seen in runs}) != [val_samples]
        for metrics, _, _ in runs:
            assert metrics["val/seen"] == val_samples
    for metrics, _, _ in runs:
        assert metrics == runs[0][0]
        assert (metrics["val/training"], metrics["val/calls"]) == (0, world_size)


def test_an_error_in_it_ends_all_ranks(place: Place) -> None:
    def work(comm: Comm) -> Ended:
        trainer = trainer_of(place.world_size, 13)
        trainer.culprit = place.culprit
        if place.culprit == comm.rank:
            return end_of(trainer)
        trainer.on_validation_end = lambda: None  # type: ignore[method-assign]  # the others wait in no collective
        return end_of(trainer)

    assert_all_stopped(run_ranks(work, place.world_size), place, 4, "ValueError: no such class in on_validation_end")
