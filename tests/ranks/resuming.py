"""A run that is cut and resumed, beside the one that is not: the trainer, its history, and what must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import safetrain
from safetrain.comm import Comm
from safetrain.observer import Event, RunInfo
from safetrain.precision import FP32, Precision
from safetrain.seeding import seed_generators
from safetrain.testing import differences, run_ranks
from tests.ranks.memory_checkpoints import MemoryCheckpoints
from tests.ranks.toys import CLASSES, FEATURES, momentum_sgd, samples

_NOT_EXACT = ("train/samples_per_s", "time/", "memory/")


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
    """The run ends here."""


class At(NamedTuple):
    """A place to cut a run at."""

    step: int
    micro: int = 0  # of the window's micro-batches
    validation: bool = False  # in the validation after this many steps
    rank: int | None = None  # only this one fails; None: all do


@dataclass
class History:
    """What happened in a run, over all its processes."""

    seen: list[tuple[int, list[int]]] = field(default_factory=list)  # (step, samples)
    told: list[Event] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Exact, with NaN equal to NaN."""
        kinds = ("train", "validation", "skip", "end")
        exact = ({k: v for k, v in e.metrics.items() if not k.startswith(_NOT_EXACT)} for e in self.told)
        return [
            f"{e.kind} {e.step} {e.epoch} {metrics} {e.text}"
            for e, metrics in zip(self.told, exact, strict=True)
            if e.kind in kinds
        ]


class Learner(safetrain.Trainer):
    """Dropout, BatchNorm, and metrics of its own."""

    history: History
    checkpoints: MemoryCheckpoints
    cut: At | None = None

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
        )

    def build_checkpoints(self) -> Any:
        return self.checkpoints

    def _cuts(self, *, validation: bool) -> bool:
        cut = self.cut
        here = cut is not None and (cut.step, cut.validation) == (self.step, validation)
        return here and cut.rank in (None, self.comm.rank)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y, index = batch
        micro = sum(step == self.step for step, _ in self.history.seen)
        if self._cuts(validation=False) and self.cut.micro == micro:
            raise Cut
        self.history.seen.append((self.step, index.tolist()))
        self.log("inputs", x.mean())
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: Any) -> None:
        if self._cuts(validation=True):
            raise Cut
        x, y, _ = batch
        self.log("loss", F.cross_entropy(self.model(x), y, reduction="none"))


@dataclass(frozen=True)
class Setting:
    """What kind of run; ``rescued``: the state is saved when it is cut; ``given`` are further arguments of the
    trainer."""

    accumulate: int = 1
    workers: int = 0
    precision: type[Precision] = FP32
    epoch_samples: int = 92
    kind: type[Learner] = Learner
    rescued: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)


def learner(setting: Setting, comm: Comm, history: History, checkpoints: MemoryCheckpoints, **given: Any) -> Learner:
    parts = {
        "train_data": Noisy(setting.epoch_samples),
        "val_data": Noisy(20),
        "optimizer": momentum_sgd,
        "scheduler": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.2),
        "loop": safetrain.Loop(epochs=3, accumulate=setting.accumulate, log_every_steps=4, clip_norm=1.0),
        "loader": safetrain.Loader(batch_size=4, num_workers=setting.workers),
        "precision": setting.precision(),
        "observers": [Recorder(history.told)],
        "checkpoint": safetrain.Checkpoint(every_steps=3, metric="val/loss", mode="min"),
    }
    parts |= dict(setting.given) | given
    parts["checkpoint"] = replace(parts["checkpoint"], at_failure_s=60 if setting.rescued else 0)
    trainer = setting.kind(**parts)
    trainer.history, trainer.checkpoints = history, checkpoints
    return trainer


def final(trainer: Learner) -> dict[str, Any]:
    """All that must be equal at the end."""
    snapshot = trainer._run.keeper.snapshot(trainer.step, trainer.epoch)
    return {"step": trainer.step, "epoch": trainer.epoch, "shared": snapshot.shared, "own": snapshot.own}


def straight(setting: Setting, comm: Comm) -> tuple[dict[str, Any], History]:
    """The run that is not cut."""
    history = History()
    trainer = learner(setting, comm, history, MemoryCheckpoints(comm))
    trainer.fit()
    return final(trainer), history


def cut_and_resumed(setting: Setting, comm: Comm, cuts: Sequence[At]) -> tuple[dict[str, Any], History]:
    """The run that is cut at each of ``cuts``, and each time goes on from its newest checkpoint in a new trainer."""
    history, steps = History(), dict[int, bytes]()
    for cut in [*cuts, None]:
        seed_generators(comm.rank + 77)  # a new process is anywhere
        trainer = learner(setting, comm, history, MemoryCheckpoints(comm, steps), resume="auto")
        trainer.cut = cut
        if cut is None:
            trainer.fit()
        else:
            with pytest.raises((safetrain.RankFailed, safetrain.PeerFailed)):
                trainer.fit()
            assert not setting.rescued or max(steps, default=0) == cut.step
            history.seen = [(step, batch) for step, batch in history.seen if step < max(steps, default=0)]
    return final(trainer), history


def assert_exact(setting: Setting, cuts: Sequence[At], world_size: int) -> None:
    """Both runs end alike, to the bit, and in between saw the same samples and told the same."""

    def work(comm: Comm) -> int:
        expected, whole = straight(setting, comm)
        found, history = cut_and_resumed(setting, comm, cuts)
        assert history.seen == whole.seen
        assert history.lines() == whole.lines()
        if setting.rescued:
            for each in (found, expected):
                del each["shared"]["report"]  # counts the saves
        assert not differences(found, expected)
        return found["step"]

    steps = run_ranks(work, world_size, timeout_s=100)
    assert steps[0] > max(cut.step for cut in cuts)
