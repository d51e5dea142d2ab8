"""HANGS G: loss scale, clipping, and steps that are skipped on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import safetrain
from safetrain.comm import Comm
from safetrain.precision import FP16, FP32, Precision
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_clean, batches_of, end_of, feed, windows_of
from tests.ranks.toys import Batch, Classifier, adamw, assert_close, mlp, momentum_sgd, train_alone

plain_sgd = partial(torch.optim.SGD, lr=1.0)


def test_h52_gradients_are_clipped_after_they_are_unscaled(world_size: int) -> None:
    """Reported: the clip acted on scaled gradients, and nothing learned. Here the step is as long as the clip allows,
    and, up to fp16's rounding, that of fp32."""
    batches = batches_of(world_size, 1)

    def work(comm: Comm, precision: Precision) -> Ended:
        loop = safetrain.Loop(clip_norm=0.1)
        return end_of(Classifier(mlp(), feed(batches), optimizer=plain_sgd, precision=precision, loop=loop))

    start = mlp().state_dict()
    half = run_ranks(work, world_size, FP16(init_scale=8192.0), timeout_s=15)
    full = run_ranks(work, world_size, FP32(), timeout_s=15)
    for ended in (half, full):
        assert_clean(ended, step=1)
        length = torch.cat([(ended[0].state[name] - value).flatten() for name, value in start.items()]).norm()
        assert float(length) == pytest.approx(0.1, rel=1e-3)
    assert_close(half[0].state, full[0].state, tolerance=1e-3)


def test_h52_the_same_update_whatever_the_scale(world_size: int) -> None:
    """A loss scale that is a power of two changes no digit of the update, clipped or not, accumulated or not."""
    batches = batches_of(world_size, 4)

    def work(comm: Comm, init_scale: float, accumulate: int) -> Ended:
        loop = safetrain.Loop(clip_norm=0.5, accumulate=accumulate, nominal_weight=4)
        precision = FP16(init_scale=init_scale)
        return end_of(Classifier(mlp(), feed(batches), optimizer=momentum_sgd, precision=precision, loop=loop))

    for accumulate in (1, 2):
        small = run_ranks(work, world_size, 256.0, accumulate, timeout_s=15)
        large = run_ranks(work, world_size, 4096.0, accumulate, timeout_s=15)
        assert_clean(small, step=4 // accumulate)
        assert_close(small[0].state, large[0].state, tolerance=1e-4)


def test_h53_a_step_is_skipped_without_an_update_of_the_scale(place: Place) -> None:
    """Reported: a step that was skipped by hand left ``unscale_`` without its ``update``, and the next one crashed.
    Here a window that is dropped, for whatever reason, is followed by ordinary ones."""
    batches = batches_of(place.world_size, 7)

    class Skips(Classifier):
        def training_step(self, batch: Batch) -> Any:
            loss = super().training_step(batch)
            if self.comm.rank == place.culprit:
                if self.step == 1:
                    return None
                if self.step == 3:
                    return loss * float("nan")
                if self.step == 5:
                    raise MemoryError("no room")
            return loss

    def work(comm: Comm) -> tuple[Ended, float]:
        precision = FP16(init_scale=1024.0)
        trainer = Skips(mlp(), feed(batches), optimizer=adamw, precision=precision, loop=safetrain.Loop(clip_norm=1.0))
        end = end_of(trainer)
        assert precision.scaler is not None
        return end, precision.scaler.get_scale()

    results = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean([end for end, _ in results], step=7, applied_steps=4)
    assert [scale for _, scale in results] == [512.0] * place.world_size  # halved once, by the NaN


class Poisons(FP32):
    """Puts an inf into one rank's gradients after their reduction, as a custom reduction might."""

    def __init__(self, comm: Comm, culprit: int, at: int) -> None:
        self.comm, self.culprit, self.at, self.steps = comm, culprit, at, 0

    def step(self, optimizers: Sequence[Optimizer], *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps == self.at and self.comm.rank == self.culprit:
            optimizers[0].param_groups[0]["params"][0].grad[0, 0] = torch.inf
        return super().step(optimizers, *args, **kwargs)


@pytest.mark.parametrize("at", [2, 4], ids=["in_the_middle", "in_the_last_step"])
def test_h54_an_inf_on_one_rank_after_the_reduction(place: Place, at: int) -> None:
    """Reported: one rank skips its step, the others take it, and the next collective deadlocks. Here the ranks notice
    that they have taken different numbers of steps, and all stop; also when no further step comes."""
    batches = batches_of(place.world_size, 4)

    def work(comm: Comm) -> Ended:
        precision = Poisons(comm, place.culprit, at)
        return end_of(Classifier(mlp(), feed(batches), optimizer=momentum_sgd, precision=precision))

    for end in run_ranks(work, place.world_size, timeout_s=15):
        assert end.error == "CommunicationError", end
        assert "the ranks differ in that" in end.text


@pytest.mark.parametrize("precision", [FP32(), FP16(init_scale=1024.0)], ids=["fp32", "fp16"])
def test_h54_an_inf_on_one_rank_before_the_reduction(place: Place, precision: Precision) -> None:
    """The ordinary case: the inf is reduced to all, so all leave that step out, and all halve their scale."""
    batches = batches_of(place.world_size, 4)

    class Overflows(Classifier):
        def training_step(self, batch: Batch) -> torch.Tensor:
            loss = super().training_step(batch)
            return loss * torch.inf if self.comm.rank == place.culprit and self.step == 2 else loss

    def work(comm: Comm) -> Ended:
        return end_of(Overflows(mlp(), feed(batches), optimizer=momentum_sgd, precision=precision))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean(ended, step=4, applied_steps=3)
    assert any(f"rank {place.culprit}, step 2: loss is inf" in line for line in ended[place.culprit].log)
    if isinstance(precision, FP32):
        windows = windows_of(batches)
        del windows[2]
        assert_close(ended[0].state, run_ranks(lambda _: train_alone(mlp(), windows, momentum_sgd), 1)[0])
