"""HANGS B, C, D: one rank leaves a batch out, stops, or runs out of memory, and the others would wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import safetrain
from safetrain.comm import Comm
from safetrain.policies import OutOfMemorySkip, Policies, SkipAny, SkipPartial
from safetrain.testing import run_ranks
from tests.ranks.outcome import (
    Ended,
    Place,
    assert_all_stopped,
    assert_clean,
    batches_of,
    end_of,
    feed,
    train_like_ddp,
    windows_of,
)
from tests.ranks.toys import (
    CLASSES,
    FEATURES,
    Batch,
    Classifier,
    PerRank,
    adamw,
    assert_close,
    mlp,
    momentum_sgd,
    train_alone,
)


@pytest.mark.parametrize("policy", [SkipAny(), SkipPartial()], ids=lambda policy: type(policy).__name__)
def test_h05_training_step_gives_none_on_one_rank(place: Place, policy: Any) -> None:
    """Reported: the ranks with a loss wait in backward for ever. Here all ranks take the same decision on that step."""
    batches = batches_of(place.world_size, 6)

    class Skips(Classifier):
        def training_step(self, batch: Batch) -> Any:
            if self.comm.rank == place.culprit and self.step == 3:
                return None
            return super().training_step(batch)

    def work(comm: Comm) -> Ended:
        return end_of(Skips(mlp(), feed(batches), optimizer=adamw, policies=Policies(skip=policy)))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    skips_all = isinstance(policy, SkipAny)
    assert_clean(ended, step=6, applied_steps=5 if skips_all else 6)
    assert [any("training_step returned None" in line for line in end.log) for end in ended] == [
        rank == place.culprit for rank in range(place.world_size)
    ]
    windows = windows_of(batches)
    windows[3] = [] if skips_all else [window for rank, window in enumerate(windows[3]) if rank != place.culprit]
    expected = run_ranks(lambda _: train_alone(mlp(), [w for w in windows if w], adamw), 1)[0]
    assert_close(ended[0].state, expected)


def refuse_short(sample: Any) -> Any:
    """A transform that finds nothing long enough in a micro-batch."""
    if sample == "too short":
        raise safetrain.SkipBatch("all samples are too short")
    if sample == "broken":
        raise ValueError("no sample left after filtering")
    return sample


def with_item(batches: list[list[Any]], place: Place, at: int, item: str) -> DataLoader[Any]:
    mine = [list(of_rank) for of_rank in batches]
    mine[place.culprit][at] = item
    return DataLoader(PerRank(mine), batch_size=None, collate_fn=refuse_short)


@pytest.mark.parametrize(
    ("policy", "at"),
    [(SkipAny(), 2), (SkipPartial(), 2), (SkipPartial(), 3)],
    ids=["any", "partial_1st", "partial_2nd"],
)
def test_h07_the_data_of_one_micro_batch_is_refused_on_one_rank(place: Place, policy: Any, at: int) -> None:
    """Reported: the loop went on without that backward, and accumulation windows drifted apart. Here windows stay in
    step."""
    batches = batches_of(place.world_size, 6)

    def work(comm: Comm) -> Ended:
        return end_of(
            Classifier(
                mlp(),
                with_item(batches, place, at, "too short"),
                optimizer=momentum_sgd,
                policies=Policies(skip=policy),
                loop=safetrain.Loop(accumulate=2, nominal_weight=4),
            )
        )

    ended = run_ranks(work, place.world_size, timeout_s=15)
    skips_all = isinstance(policy, SkipAny)
    assert_clean(ended, step=3, applied_steps=2 if skips_all else 3)
    windows = windows_of(batches, 2)
    if skips_all:
        del windows[1]
    else:
        del windows[1][2 * place.culprit + at - 2]
    assert_close(ended[0].state, run_ranks(lambda _: train_alone(mlp(), windows, momentum_sgd), 1)[0])


def test_h07_a_data_error_that_is_no_skip_stops_all_ranks_with_its_line(place: Place) -> None:
    """Reported: the exception was caught on one rank, which went on. Here all ranks stop at that step, and name the
    line."""
    batches = batches_of(place.world_size, 6)

    def work(comm: Comm) -> Ended:
        data = with_item(batches, place, 3, "broken")
        return end_of(
            Classifier(mlp(), data, optimizer=momentum_sgd, loop=safetrain.Loop(accumulate=2, nominal_weight=4))
        )

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_all_stopped(ended, place, 1, "no sample left after filtering", "test_hangs_skips.py", "refuse_short")
    assert ended[place.culprit].cause == "ValueError('no sample left after filtering')"


def test_h26_early_stopping_is_met_on_one_rank_only(place: Place) -> None:
    """Reported: a rank whose own score crossed the line left, the others hung. Here all stop after the same step."""
    batches = batches_of(place.world_size, 8)

    class Stops(Classifier):
        def training_step(self, batch: Batch) -> torch.Tensor:
            if self.comm.rank == place.culprit and self.step == 2:
                self.stop()
            return super().training_step(batch)

    def work(comm: Comm) -> Ended:
        return end_of(Stops(mlp(), feed(batches), optimizer=momentum_sgd, loop=safetrain.Loop(epochs=3)))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean(ended, step=3)
    expected = run_ranks(lambda _: train_alone(mlp(), windows_of(batches)[:3], momentum_sgd), 1)[0]
    assert_close(ended[0].state, expected)


def test_h26_a_score_from_validation_is_the_same_on_all_ranks(place: Place) -> None:
    """Reported: each rank judged by its own validation loss. Here what ``self.metrics`` holds is already over all
    ranks."""
    batches = batches_of(place.world_size, 2)
    validation = batches_of(place.world_size, 1)
    validation[place.culprit] = [(x, torch.full_like(y, 1)) for x, y in validation[place.culprit]]

    class StopsOnScore(Classifier):
        def on_epoch_start(self) -> None:
            if self.epoch == 2:
                self.limit = self.metrics["val/loss"]
            if self.epoch > 2 and self.metrics["val/loss"] < self.limit:
                self.stop()

    def work(comm: Comm) -> Ended:
        trainer = StopsOnScore(
            mlp(), feed(batches), feed(validation), optimizer=momentum_sgd, loop=safetrain.Loop(epochs=6)
        )
        return end_of(trainer)

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean(ended, step=ended[0].step)
    assert len({end.metrics["val/loss"] for end in ended}) == 1


def normed() -> nn.Sequential:
    """BatchNorm after the activation: right before it, a bias would have a gradient of rounding noise, which AdamW
    blows up."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


@pytest.mark.parametrize(
    ("layer", "make_optimizer"),
    [(0, momentum_sgd), (3, adamw), (5, momentum_sgd)],
    ids=["first_layer", "middle_layer", "last_layer"],
)
def test_h31_out_of_memory_in_backward_on_one_rank(place: Place, layer: int, make_optimizer: Any) -> None:
    """Reported: the batch was skipped on one rank, some of its buckets sent. Here the window leaves no trace, on any
    rank."""
    batches = batches_of(place.world_size, 5)

    def exhaust(gradient: torch.Tensor) -> None:
        raise MemoryError("no room for this layer's gradient")

    class Exhausts(Classifier):
        def training_step(self, batch: Batch) -> torch.Tensor:
            x, y = batch
            for index, module in enumerate(self.model.children()):
                x = module(x)
                if index == layer and self.comm.rank == place.culprit and self.step == 2:
                    x.register_hook(exhaust)
            return F.cross_entropy(x, y)

    def work(comm: Comm) -> Ended:
        trainer = Exhausts(
            normed(), feed(batches), optimizer=make_optimizer, strategy=safetrain.DDPStrategy(bucket_cap_mb=1e-4)
        )
        return end_of(trainer)

    ended = run_ranks(work, place.world_size, timeout_s=15)
    weights = [
        Ended(**{**vars(end), "state": {k: v for k, v in end.state.items() if "running" not in k}}) for end in ended
    ]
    assert_clean(weights, step=5, applied_steps=4)
    assert any("out of memory in backward" in line and "exhaust" in line for line in ended[place.culprit].log)
    windows = windows_of(batches)
    del windows[2]
    expected = run_ranks(lambda _: train_like_ddp(normed(), windows, make_optimizer), 1)[0]
    assert_close(ended[0].state, expected)


def test_h31_out_of_memory_again_and_again_stops_all_ranks(place: Place) -> None:
    """Reported: a job that skipped for ever. Here the policy's limit ends it on all ranks, with the rank's number."""
    batches = batches_of(place.world_size, 9)

    class Exhausts(Classifier):
        def training_step(self, batch: Batch) -> torch.Tensor:
            if self.comm.rank == place.culprit and self.step >= 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch)

    def work(comm: Comm) -> Ended:
        policies = Policies(out_of_memory=OutOfMemorySkip(max_consecutive=2))
        return end_of(Exhausts(mlp(), feed(batches), optimizer=momentum_sgd, policies=policies))

    for end in run_ranks(work, place.world_size, timeout_s=15):
        assert (end.error, end.step) == ("TrainingStopped", 3)
        assert f"out of memory (rank {place.culprit})" in end.text
        assert "policy.out_of_memory.max_consecutive=2" in end.text
