"""A run that is cut and resumed is the run that was not: weights, optimizer, batches, logged metrics, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import safetrain
from safetrain.comm import Comm
from safetrain.observer import Event, RunInfo
from safetrain.precision import FP32, Precision
from safetrain.testing import run_ranks
from tests.ranks.memory_checkpoints import MemoryCheckpoints
from tests.ranks.toys import CLASSES, FEATURES, momentum_sgd, samples

_one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.2)
_NOT_EXACT = "train/samples_per_s"


class Noisy(Dataset[Any]):
    """Each sample is drawn from torch's generator when it is read, and comes with its number."""

    def __init__(self, count: int) -> None:
        self._x, self._y = samples(count)

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> Any:
        return self._x[index] + 0.1 * torch.randn(FEATURES), self._y[index], index


class Recorder:
    """An observer that keeps what it is told, as a file would: from ``start_events`` on it is written anew."""

    def __init__(self, told: list[Event]) -> None:
        self.told = told

    def start(self, run: RunInfo) -> None:
        del self.told[run.start_events :]

    def step(self, step: int, epoch: int) -> None:
        pass

    def event(self, event: Event) -> None:
        self.told.append(event)

    def close(self) -> None:
        pass


class Cut(Exception):
    """The run is cut here."""


@dataclass
class History:
    """What happened in a run, over all its processes."""

    seen: list[tuple[int, list[int]]] = field(default_factory=list)  # (step, samples)
    told: list[Event] = field(default_factory=list)

    def lines(self) -> list[Any]:
        kinds = ("train", "validation", "skip", "end")
        return [
            (e.kind, e.step, e.epoch, {k: v for k, v in e.metrics.items() if k != _NOT_EXACT}, e.text)
            for e in self.told
            if e.kind in kinds
        ]


class Learner(safetrain.Trainer):
    """Dropout, BatchNorm, and metrics of its own; raises ``Cut`` in a window, or in validation."""

    history: History
    checkpoints: MemoryCheckpoints
    cut_at: int | None = None
    cut_in_validation = False

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
        )

    def build_checkpoints(self) -> Any:
        return self.checkpoints

    def training_step(self, batch: Any) -> torch.Tensor:
        if self.step == self.cut_at:
            raise Cut
        x, y, index = batch
        self.history.seen.append((self.step, index.tolist()))
        self.log("inputs", x.mean())
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: Any) -> None:
        if self.step == self.cut_at and self.cut_in_validation:
            raise Cut
        x, y, _ = batch
        self.log("loss", F.cross_entropy(self.model(x), y, reduction="none"))


@dataclass(frozen=True)
class Setting:
    accumulate: int = 1
    workers: int = 0
    precision: type[Precision] = FP32
    scheduler: Any = _one_cycle
    every_steps: int | None = 3


def learner(setting: Setting, comm: Comm, history: History, checkpoints: MemoryCheckpoints, **given: Any) -> Learner:
    trainer = Learner(
        train_data=Noisy(90),
        val_data=Noisy(20),
        optimizer=momentum_sgd,
        scheduler=setting.scheduler,
        loop=safetrain.Loop(epochs=3, accumulate=setting.accumulate, log_every_steps=4, clip_norm=1.0),
        loader=safetrain.Loader(batch_size=4, num_workers=setting.workers),
        precision=setting.precision(),
        observers=[Recorder(history.told)],
        checkpoint=safetrain.Checkpoint(every_steps=setting.every_steps, metric="val/loss", mode="min"),
        **given,
    )
    trainer.history, trainer.checkpoints = history, checkpoints
    return trainer


def final(trainer: Learner) -> dict[str, Any]:
    """All that must be equal at the end."""
    run = trainer._run
    snapshot = run.keeper.snapshot(trainer.step, trainer.epoch)
    own = {name: value for name, value in snapshot.own.items() if name != "val_data"}
    shared = {name: value for name, value in snapshot.shared.items() if name != "report"}  # counts notes of resumes
    return {"step": trainer.step, "epoch": trainer.epoch, "shared": shared, "own": own}


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), f"{where}: {a!r} and {b!r}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_equal(*pair, f"{where}.{index}")
    else:
        assert a == b or a != a, f"{where}: {a!r} and {b!r}"


def straight(setting: Setting, comm: Comm) -> tuple[dict[str, Any], History]:
    history = History()
    trainer = learner(setting, comm, history, MemoryCheckpoints(comm))
    trainer.fit()
    return final(trainer), history


def cut_and_resumed(setting: Setting, comm: Comm, cuts: list[int], **how: Any) -> tuple[dict[str, Any], History]:
    """Cut in each of the windows ``cuts``, and each time go on from the newest checkpoint in a new trainer."""
    history, steps = History(), {}
    for cut in [*cuts, None]:
        checkpoints = MemoryCheckpoints(comm, steps)
        torch.manual_seed(comm.rank + 77)  # a new process is anywhere
        trainer = learner(setting, comm, history, checkpoints, resume="auto")
        trainer.cut_at = cut
        for name, value in how.items():
            setattr(trainer, name, value)
        if cut is not None:
            with pytest.raises((safetrain.RankFailed, safetrain.PeerFailed)):
                trainer.fit()
            start = max(steps, default=0)
            history.seen = [(step, index) for step, index in history.seen if step < start]
        else:
            trainer.fit()
    return final(trainer), history


def test_mid_epoch_on_one_rank() -> None:
    def work(comm: Comm) -> None:
        expected, whole = straight(Setting(), comm)
        found, history = cut_and_resumed(Setting(), comm, [7])
        assert_equal(found, expected)
        assert history.seen == whole.seen
        assert history.lines() == whole.lines()

    run_ranks(work, 1)
