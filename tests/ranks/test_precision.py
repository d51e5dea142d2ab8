"""Number formats and clipping: the order scale, backward, unscale, clip, step, update, on all ranks alike."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import safetrain
from safetrain.comm import Comm
from safetrain.policies import NonFiniteSkip, Policies
from safetrain.precision import BF16, FP16, FP32, Precision
from safetrain.testing import run_ranks
from tests.ranks.toys import Classifier, PerRank, assert_close, assert_same, mlp, momentum_sgd, ready, samples, state

RANKS = pytest.mark.parametrize(("world_size", "faulty"), [(2, 0), (2, 1), (4, 0), (4, 3)])


class Blows(Classifier):
    """The loss overflows where the batch says so, scaled or not."""

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y, factor = batch
        return F.cross_entropy(self.model(x).float(), y) * factor


def data(world_size: int, steps: int, blown: dict[tuple[int, int], float]) -> list[list[Any]]:
    return [
        [(*samples(4, seed=100 * rank + step), blown.get((rank, step), 1.0)) for step in range(steps)]
        for rank in range(world_size)
    ]


def train(
    comm: Comm, batches: Any, precision: Precision, *, policies: Policies | None = None, **loop: Any
) -> tuple[safetrain.Trainer, safetrain.Result]:
    trainer = Blows(
        mlp(),
        ready(PerRank(batches)),
        optimizer=momentum_sgd,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        precision=precision,
        policies=policies,
        loop=safetrain.Loop(nominal_weight=4, **loop),
    )
    return trainer, trainer.fit()


@RANKS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_on_one_rank_is_skipped_by_all_and_the_scale_stays_equal(
    world_size: int, faulty: int, accumulate: int
) -> None:
    """Steps 1 and 3 of 5 overflow on one rank. Weights, scale and learning rate are those of the three real steps."""
    blown = {(faulty, 1 * accumulate): 1e38, (faulty, 3 * accumulate + accumulate - 1): 1e38}
    batches = data(world_size, 5 * accumulate, blown)
    whole = [i for i in range(5 * accumulate) if i // accumulate not in (1, 3)]

    def work(comm: Comm) -> Any:
        options = {"accumulate": accumulate, "clip_norm": 0.1}
        trainer, result = train(comm, batches, FP16(init_scale=1024.0), **options)
        without = [[mine[i] for i in whole] for mine in batches]
        expected, _ = train(comm, without, FP16(init_scale=1024.0), **options)
        scaler = trainer.precision.scaler
        assert scaler is not None
        lr = trainer.optimizers["optimizer"].param_groups[0]["lr"]
        return state(trainer), state(expected), result.step, result.applied_steps, scaler.state_dict(), lr

    results = run_ranks(work, world_size)
    for weights, expected, step, applied, scaler, lr in results:
        assert (step, applied) == (5, 3)
        assert scaler["scale"] == 1024.0 / 4
        assert scaler["_growth_tracker"] == 1
        assert lr == pytest.approx(0.1 * 0.5**3, rel=1e-12)
        # another scale at step 4: fp16 rounds alike but for subnormals
        assert_close(weights, expected, 1e-3)
    assert_same([weights for weights, *_ in results])


@pytest.mark.parametrize("clip", [{"clip_norm": 0.05}, {"clip_value": 0.02}], ids=["norm", "value"])
@pytest.mark.parametrize("precision", [FP16(init_scale=65536.0), BF16()], ids=["fp16", "bf16"])
def test_clip_then_step_equals_the_fp32_reference(clip: dict[str, float], precision: Precision) -> None:
    """Clipping scaled gradients, or unscaling after the clip, would be off by a factor of 65536."""
    batches = data(2, 6, {})

    def work(comm: Comm) -> Any:
        low, _ = train(comm, batches, precision, **clip)
        full, _ = train(comm, batches, FP32(), **clip)
        moved = max(
            (a - b).abs().max().item() for a, b in zip(state(full).values(), mlp().state_dict().values(), strict=True)
        )
        return state(low), state(full), moved

    for low, full, moved in run_ranks(work, 2):
        assert moved > 5e-4  # the reference did learn
        assert_close(low, full, 0.05 * moved)


@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_in_fp32_is_torchs_own(world_size: int) -> None:
    batches = data(world_size, 4, {})

    def work(comm: Comm) -> Any:
        trainer, _ = train(comm, batches, FP32(), clip_norm=0.05)
        return state(trainer)

    model, lr = mlp(), 0.1
    optimizer = momentum_sgd(model.parameters())
    for step in range(4):
        optimizer.param_groups[0]["lr"] = lr * 0.5**step
        optimizer.zero_grad()
        for rank in range(world_size):
            x, y, _ = batches[rank][step]
            (F.cross_entropy(model(x), y) / world_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for weights in run_ranks(work, world_size):
        assert_close(weights, expected)


def test_a_scale_on_its_way_down_does_not_count_as_a_row_of_bad_steps() -> None:
    """From 2**40 the scale comes down to where nothing overflows, in more windows than the limit of 3 in a row."""

    def work(comm: Comm) -> Any:
        trainer, result = train(
            comm,
            data(2, 40, {}),
            FP16(init_scale=2.0**40),
            policies=Policies(non_finite=NonFiniteSkip(max_consecutive=3)),
        )
        assert trainer.precision.scaler is not None
        return result.step, result.applied_steps, trainer.precision.scaler.get_scale(), state(trainer)

    results = run_ranks(work, 2)
    assert results[0][:3] == results[1][:3]
    step, applied, scale, _ = results[0]
    assert step == 40
    assert 3 < step - applied < 40
    assert scale == 2.0 ** (40 - (step - applied))
    assert_same([weights for *_, weights in results])


@RANKS
@pytest.mark.parametrize("precision", [FP32, partial(FP16, init_scale=1024.0)], ids=["fp32", "fp16"])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=["sgd", "adamw"])
def test_a_step_left_out_on_the_device_is_one_left_out_by_the_host(
    world_size: int, faulty: int, precision: Any, make_optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does with fused optimizers, on the CPU: the host learns of a bad window only in the next one."""
    batches = data(world_size, 6, {(faulty, 1): float("nan"), (faulty, 2): float("inf"), (faulty, 5): float("nan")})

    def work(comm: Comm) -> Any:
        skips: list[str] = []
        trainer = Blows(
            mlp(norm=True),
            ready(PerRank(batches)),
            optimizer=partial(make_optimizer, lr=0.05, fused=True),
            scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
            precision=precision(),
            loop=safetrain.Loop(nominal_weight=4, clip_norm=0.1),
        )
        trainer.on_epoch_start = lambda: logging.getLogger("safetrain").addFilter(  # type: ignore[method-assign]
            lambda record: skips.append(record.getMessage()) is None
        )
        result = trainer.fit()
        lr = trainer.optimizers["optimizer"].param_groups[0]["lr"]
        return state(trainer), result.step, result.applied_steps, lr, skips

    by_host = run_ranks(work, world_size)
    monkeypatch.setattr(Precision, "skips_on_device", lambda self, optimizers: True)
    on_device = run_ranks(work, world_size)
    for rank, (host, device) in enumerate(zip(by_host, on_device, strict=True)):
        assert device[1:4] == host[1:4] == (6, 3, pytest.approx(0.05 * 0.5**3, rel=1e-12))
        assert all(torch.equal(value, host[0][name]) for name, value in device[0].items())
        assert (
            device[4] == host[4] == ([f"rank {rank}, step {s}: loss is {v}" for s, v in BAD] if rank == faulty else [])
        )


BAD = [(1, "nan"), (2, "inf"), (5, "nan")]
