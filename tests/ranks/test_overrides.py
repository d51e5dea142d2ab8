"""What a Trainer's methods are called with, and when: the end of training, derived metrics, groups of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import safetrain
from safetrain.comm import Comm
from safetrain.testing import RankError, run_ranks
from tests.ranks.toys import Classifier, dataset, mlp, momentum_sgd


class Perplexed(Classifier):
    """Notes what it is given."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.given: list[Mapping[str, float]] = []
        self.at_end: list[Any] = []

    def derived_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        self.given.append(metrics)
        return {"perplexity": 2 ** metrics["loss"]}

    def on_train_end(self) -> None:
        saved = self.run_dir is not None and (self.run_dir / "checkpoints/latest").exists()
        with self.rank_zero("at the end") as mine:
            self.at_end.append((mine, self.step, self.epoch, self.model.training, saved, dict(self.metrics)))


def trainer_of(run_dir: Path | None = None, **parts: Any) -> Perplexed:
    given = {"optimizer": momentum_sgd, "loop": safetrain.Loop(epochs=3), "run_dir": run_dir, **parts}
    return Perplexed(mlp(), dataset(32), dataset(13), loader=safetrain.Loader(batch_size=4), **given)


def test_derived_metrics_are_made_of_those_of_all_ranks(world_size: int, tmp_path: Path) -> None:
    checkpoint = safetrain.Checkpoint(metric="val/perplexity", mode="min")

    def work(comm: Comm) -> Any:
        trainer = trainer_of(tmp_path, checkpoint=checkpoint)
        return dict(trainer.fit().metrics), trainer.given

    for metrics, given in run_ranks(work, world_size):
        assert [sorted(each) for each in given] == [["accuracy", "loss"]] * 3
        assert metrics == {
            "val/accuracy": given[2]["accuracy"],
            "val/loss": given[2]["loss"],
            "val/perplexity": 2 ** given[2]["loss"],
        }
    assert (tmp_path / "checkpoints/best").exists()


def test_at_the_end_all_is_trained_validated_and_saved(world_size: int, tmp_path: Path) -> None:
    def work(comm: Comm) -> Any:
        trainer = trainer_of(tmp_path)
        trainer.fit()
        return trainer.at_end

    steps = 3 * 32 // (4 * world_size)
    for rank, ((mine, step, epoch, training, saved, metrics),) in enumerate(run_ranks(work, world_size)):
        assert (mine, step, epoch, training, saved) == (rank == 0, steps, 3, False, True)
        assert "val/perplexity" in metrics


def test_an_error_at_the_end_is_one_of_all_ranks(world_size: int) -> None:
    def work(comm: Comm) -> str:
        trainer = trainer_of()

        def fails() -> None:
            with trainer.rank_zero("export") as mine:
                if mine:
                    raise ValueError("no space")

        trainer.on_train_end = fails  # type: ignore[method-assign]
        with pytest.raises((safetrain.RankFailed, safetrain.PeerFailed)) as raised:
            trainer.fit()
        return str(raised.value)

    assert all("ValueError: no space" in text for text in run_ranks(work, world_size))


@pytest.mark.parametrize(
    ("loop", "validated"),
    [
        (safetrain.Loop(epochs=5, validate_every_epochs=2), [2, 4, 5]),
        (safetrain.Loop(epochs=5, validate_every_epochs=2, max_steps=9), [2, 3]),
        (safetrain.Loop(epochs=2, validate_every_epochs=10), [2]),
    ],
    ids=["epochs", "max_steps", "fewer"],
)
def test_the_last_epoch_is_validated(loop: safetrain.Loop, validated: list[int]) -> None:
    def work(comm: Comm) -> list[int]:
        trainer, epochs = trainer_of(loop=loop), []
        derived = trainer.derived_metrics

        def noted(metrics: Mapping[str, float]) -> Mapping[str, float]:
            epochs.append(trainer.epoch + 1)
            return derived(metrics)

        trainer.derived_metrics = noted  # type: ignore[method-assign]
        trainer.fit()
        return epochs

    assert run_ranks(work, 2) == [validated] * 2


def test_groups_of_parameters_have_rates_of_their_own(world_size: int) -> None:
    """Twice the rate moves a layer twice as far; none at all, not at all."""

    def work(comm: Comm) -> list[torch.Tensor]:
        moved = []
        for rates in ((0.1, 0.1), (0.2, 0.0)):
            trainer = trainer_of(optimizer=partial(torch.optim.SGD, lr=1.0), loop=safetrain.Loop(max_steps=1))
            trainer.parameter_groups = (
                lambda trainer=trainer, rates=rates: [  # type: ignore[method-assign]
                    {"params": part.parameters(), "lr": rate}
                    for part, rate in zip((trainer.model[:2], trainer.model[2:]), rates, strict=True)
                ]
            )
            trainer.fit()
            moved += [trainer.model[at].weight.detach() - mlp()[at].weight.detach() for at in (0, 2)]
        return moved

    for first, last, first_faster, last_not in run_ranks(work, world_size):
        assert torch.allclose(first_faster, 2 * first, atol=1e-6)
        assert first.abs().max() > 1e-4
        assert last.abs().max() > 1e-4
        assert not last_not.any()


def test_parameters_in_no_group_are_named() -> None:
    def work(comm: Comm) -> None:
        trainer = trainer_of()
        trainer.parameter_groups = lambda: [{"params": trainer.model[0].parameters()}]  # type: ignore[method-assign]
        trainer.fit()

    with pytest.raises(RankError, match=r"in no optimizer: 2\.weight, 2\.bias"):
        run_ranks(work, 2)


def test_a_scheduler_that_wants_a_metric_is_refused_before_the_first_step() -> None:
    def work(comm: Comm) -> int:
        trainer = trainer_of(scheduler=ReduceLROnPlateau)
        with pytest.raises(safetrain.UsageError, match=r"ReduceLROnPlateau .* on_epoch_start"):
            trainer.fit()
        return trainer.step

    assert run_ranks(work, 2) == [0, 0]
