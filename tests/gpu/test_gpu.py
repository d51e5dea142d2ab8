"""What holds on a GPU: an ordinary step asks nothing of the host, and a bad window is left out on the device."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import safetrain
from safetrain.comm import Comm
from safetrain.precision import BF16, FP16, FP32, Precision
from tests.ranks.toys import CLASSES, FEATURES, mlp, samples

pytestmark = pytest.mark.gpu
STEPS = 40
fused_adamw = partial(torch.optim.AdamW, lr=0.01, fused=True)


class Plain(safetrain.Trainer):
    """From ``silent_from`` on, a step that makes the host wait for the device is an error."""

    silent_from = math.inf
    bad_step = -1

    def training_step(self, batch: Any) -> torch.Tensor:
        if self.step == self.silent_from:
            torch.cuda.set_sync_debug_mode("error")
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        return loss * math.nan if self.step == self.bad_step else loss


def _trainer(precision: Precision | None = None, **options: Any) -> Plain:
    return Plain(
        mlp(norm=True), TensorDataset(*samples(STEPS * 16)), optimizer=fused_adamw, precision=precision or FP32(),
        loader=safetrain.Loader(batch_size=16, pin_memory=True, num_workers=1), device="cuda",
        loop=safetrain.Loop(clip_norm=1.0, log_every_steps=10 * STEPS, **options), audit=safetrain.Audit(every_steps=0),
    )  # fmt: skip


@pytest.mark.parametrize("precision", [FP32, BF16, FP16])
def test_an_ordinary_step_does_not_make_the_host_wait(gpu: Comm, precision: type[Precision]) -> None:
    trainer = _trainer(precision(), max_steps=STEPS - 5)
    trainer.silent_from = 10
    try:
        assert trainer.fit().applied_steps == STEPS - 5
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", [FP32, BF16, FP16])
def test_a_window_that_is_not_finite_leaves_no_trace(gpu: Comm, precision: type[Precision]) -> None:
    """The same weights, moments and running statistics as a run in which the batch was left out by its policy."""
    ends = []
    for bad_step in (STEPS // 2, -1):
        trainer = _trainer(precision())
        trainer.bad_step = bad_step
        result = trainer.fit()
        assert result.skipped_steps == (bad_step >= 0)
        assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
        ends.append(result)
    assert ends[0].applied_steps == STEPS - 1
    assert ends[1].applied_steps == STEPS


def test_the_parts_of_a_step_are_the_devices(gpu: Comm) -> None:
    told: dict[str, float] = {}

    class Watching:
        def start(self, run: Any) -> None: ...
        def step(self, step: int, epoch: int) -> None: ...
        def close(self) -> None: ...
        def event(self, event: Any) -> None:
            if event.kind == "train":
                told.update(event.metrics)

    model = nn.Sequential(
        nn.Linear(FEATURES, 4096), *[nn.Linear(4096, 4096) for _ in range(8)], nn.Linear(4096, CLASSES)
    )
    trainer = Plain(
        model, TensorDataset(*samples(STEPS * 4096)), optimizer=fused_adamw, device="cuda", observers=[Watching()],
        loader=safetrain.Loader(batch_size=4096), loop=safetrain.Loop(log_every_steps=10),
    )  # fmt: skip
    trainer.fit()
    assert told["time/backward_ms"] > told["time/forward_ms"] > 0.5


def test_the_cost_of_a_step(gpu: Comm) -> None:
    """Printed, and held only loosely: a test must not depend on a timing. benchmarks/ has the tables."""
    width, steps = 4096, 100
    x, y = torch.randn(4096, width, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(8)], nn.Linear(width, CLASSES)).cuda()

    def bare() -> float:
        model = make()
        optimizer = fused_adamw(model.parameters())
        for step in range(steps + 10):
            if step == 10:
                torch.cuda.synchronize()
                began = time.perf_counter()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps

    class Ours(safetrain.Trainer):
        began = 0.0

        def training_step(self, batch: Any) -> torch.Tensor:
            if self.step == 10:
                torch.cuda.synchronize()
                self.began = time.perf_counter()
            return F.cross_entropy(self.model(x), y)

    trainer = Ours(
        make(), TensorDataset(torch.zeros(steps + 10, 1)), optimizer=fused_adamw, device="cuda",
        loader=safetrain.Loader(batch_size=1), loop=safetrain.Loop(log_every_steps=1000),
    )  # fmt: skip
    bare_s = bare()
    trainer.fit()
    torch.cuda.synchronize()
    ours_s = (time.perf_counter() - trainer.began) / steps
    print(f"bare {1000 * bare_s:.2f} ms, safetrain {1000 * ours_s:.2f} ms: {ours_s / bare_s:.3f}")
    assert ours_s < 3 * bare_s
