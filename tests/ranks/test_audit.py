"""Replicas that drift apart are found by the next audit, with rank, name and steps; what may differ is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import safetrain
from safetrain.audit import fingerprint
from safetrain.comm import Comm
from safetrain.precision import FP16
from safetrain.testing import run_ranks
from tests.ranks.toys import Classifier, adamw, dataset, mlp, momentum_sgd

EVERY, DRIFTS_AT = 2, 3


def parameter(trainer: safetrain.Trainer) -> None:
    trainer.model.get_parameter("3.weight")[1, 2] += 1e-6


def buffer(trainer: safetrain.Trainer) -> None:
    trainer.model.get_buffer("table")[2] += 1


def optimizer_state(trainer: safetrain.Trainer) -> None:
    (optimizer,) = trainer.optimizers.values()
    optimizer.state[trainer.model.get_parameter("3.weight")]["momentum_buffer"][0] += 1e-6


def learning_rate(trainer: safetrain.Trainer) -> None:
    (optimizer,) = trainer.optimizers.values()
    optimizer.param_groups[0]["lr"] = 0.05


def frozen_parameter(trainer: safetrain.Trainer) -> None:
    trainer.model.get_parameter("frozen").add_(1)


class Drifting(Classifier):
    culprit: int = -1
    drift: Callable[[safetrain.Trainer], None]

    def build_model(self) -> nn.Module:
        model = mlp(norm=True)
        model.register_buffer("table", torch.arange(4.0))
        model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        return model

    def training_step(self, batch: Any) -> Any:
        if self.step == DRIFTS_AT and self.comm.rank == self.culprit:
            with torch.no_grad():
                self.drift(self)
        return super().training_step(batch)


def make(comm: Comm, **options: Any) -> Drifting:
    return Drifting(
        None, dataset(32 * comm.world_size), loader=safetrain.Loader(batch_size=4),
        **{"optimizer": momentum_sgd, "audit": safetrain.Audit(every_steps=EVERY), **options},
    )  # fmt: skip


@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (4, 0), (4, 3)], ids=lambda value: str(value))
@pytest.mark.parametrize(
    ("drift", "name"),
    [
        (parameter, "parameter 3.weight"),
        (frozen_parameter, "parameter frozen"),
        (buffer, "buffer table"),
        (optimizer_state, "optimizer's momentum_buffer of 3.weight"),
        (learning_rate, "optimizer's lr (param_groups[0])"),
    ],
)
def test_drift_is_named(world_size: int, culprit: int, drift: Callable[..., None], name: str) -> None:
    def work(comm: Comm) -> tuple[str, int, tuple[int, ...]]:
        trainer = make(comm, strategy=safetrain.DDPStrategy(broadcast_buffers=False))
        trainer.culprit, trainer.drift = culprit, drift  # type: ignore[method-assign]
        with pytest.raises(safetrain.RanksDiffer) as caught:
            trainer.fit()
        return str(caught.value), caught.value.step, caught.value.ranks

    results = run_ranks(work, world_size)
    assert len(set(results)) == 1
    text, step, odd = results[0]
    assert step == 4
    assert "between steps 2 and 4" in text
    first = text.splitlines()[1]
    assert f" in {name}: " in first
    if world_size > 2 or drift in (buffer, learning_rate, frozen_parameter):
        assert first.startswith(f"  rank {culprit} differs from the others")
        assert odd == (culprit,)
    else:
        assert first.startswith("  ranks 0 and 1 differ"), "of two, nothing tells which"


def test_h105_a_learning_rate_that_differs_from_the_start_is_found_before_the_first_step(world_size: int) -> None:
    def work(comm: Comm) -> str:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1 * (1 + comm.rank))

        trainer = make(comm, optimizer=optimizer)
        with pytest.raises(safetrain.RanksDiffer) as caught:
            trainer.fit()
        return f"{trainer.step} {caught.value}"

    for text in run_ranks(work, world_size):
        assert text.startswith(
            "0 step 0: the ranks' replicas are not the same any more; they drifted apart before step 0"
        )
        assert "optimizer's lr (param_groups[0]): 0.1 on rank 0; 0.2 on rank 1" in text


class RunningMean(nn.Module):
    """Running statistics of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_running_statistics_may_differ(world_size: int, broadcast_buffers: bool) -> None:
    class Trainer(Classifier):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.BatchNorm1d(8), RunningMean())

    def work(comm: Comm) -> int:
        trainer = Trainer(
            None, dataset(32 * comm.world_size), optimizer=adamw, loader=safetrain.Loader(batch_size=4),
            strategy=safetrain.DDPStrategy(broadcast_buffers=broadcast_buffers), precision=FP16(),
            audit=safetrain.Audit(every_steps=1),
        )  # fmt: skip
        return trainer.fit().step

    assert run_ranks(work, world_size) == [8] * world_size


def test_a_short_run_is_audited_at_its_end() -> None:
    def work(comm: Comm) -> str:
        trainer = make(comm, audit=safetrain.Audit())
        trainer.culprit, trainer.drift = 1, parameter  # type: ignore[method-assign]
        with pytest.raises(safetrain.RanksDiffer) as caught:
            trainer.fit()
        return str(caught.value)

    assert all("between steps 0 and 8" in text for text in run_ranks(work, 2))


def test_it_can_be_switched_off() -> None:
    def work(comm: Comm) -> int:
        trainer = make(comm, audit=safetrain.Audit(every_steps=0))
        trainer.culprit, trainer.drift = 1, parameter  # type: ignore[method-assign]
        return trainer.fit().step

    assert run_ranks(work, 2) == [8, 8]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_a_fingerprint_sees_every_element(dtype: torch.dtype) -> None:
    zeros = torch.zeros(5, 3, dtype=dtype)
    seen = {tuple(fingerprint(zeros).tolist())}
    for index in range(1, zeros.numel() + 1):
        changed = zeros.clone()
        changed.view(-1)[:index] = 1
        seen.add(tuple(fingerprint(changed).tolist()))
    assert len(seen) == zeros.numel() + 1
    assert torch.equal(fingerprint(zeros.t()), fingerprint(zeros))
    assert fingerprint(torch.tensor(2.0, dtype=torch.float32)).shape == (2,)
