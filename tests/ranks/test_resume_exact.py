"""A run that is cut and resumed is the run that was not: weights, optimizer, batches, logged metrics, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from safetrain.precision import FP16, FP32, Precision
from safetrain.seeding import seed_generators
from safetrain.testing import run_ranks
from tests.ranks.memory_checkpoints import MemoryCheckpoints
from tests.ranks.toys import CLASSES, FEATURES, momentum_sgd, samples

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

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
    """The run ends here."""


class At(NamedTuple):
    """A place to cut a run at."""

    step: int
    micro: int = 0  # of the window's micro-batches
    validation: bool = False  # in the validation after this many steps


@dataclass
class History:
    """What happened in a run, over all its processes."""

    seen: list[tuple[int, list[int]]] = field(default_factory=list)  # (step, samples)
    told: list[Event] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Exact, with NaN equal to NaN."""
        kinds = ("train", "validation", "skip", "end")
        return [
            f"{e.kind} {e.step} {e.epoch} { {k: v for k, v in e.metrics.items() if k != _NOT_EXACT} } {e.text}"
            for e in self.told
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

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y, index = batch
        micro = sum(step == self.step for step, _ in self.history.seen)
        if self.cut == (self.step, micro, False):
            raise Cut
        self.history.seen.append((self.step, index.tolist()))
        self.log("inputs", x.mean())
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: Any) -> None:
        if self.cut is not None and self.cut.validation and self.cut.step == self.step:
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
    epoch_samples: int = 92


def learner(setting: Setting, comm: Comm, history: History, checkpoints: MemoryCheckpoints, **given: Any) -> Learner:
    trainer = Learner(
        train_data=Noisy(setting.epoch_samples),
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
    return {"step": trainer.step, "epoch": trainer.epoch, "shared": snapshot.shared, "own": own}


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
            history.seen = [(step, batch) for step, batch in history.seen if step < max(steps, default=0)]
    return final(trainer), history


def assert_exact(setting: Setting, cuts: Sequence[At], world_size: int) -> None:
    def work(comm: Comm) -> int:
        expected, whole = straight(setting, comm)
        found, history = cut_and_resumed(setting, comm, cuts)
        assert history.seen == whole.seen
        assert history.lines() == whole.lines()
        assert_equal(found, expected)
        return found["step"]

    steps = run_ranks(work, world_size, timeout_s=100)
    assert steps[0] > max(cut.step for cut in cuts)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", [FP32, FP16])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_cut_inside_an_epoch(world_size: int, precision: type[Precision], workers: int, accumulate: int) -> None:
    setting = Setting(accumulate=accumulate, workers=workers, precision=precision)
    assert_exact(setting, [At(8, micro=accumulate - 1)], world_size)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "cuts",
    [
        [At(1)],  # before the first checkpoint
        [At(12, validation=True)],  # at the end of the first epoch of two ranks
        [At(3), At(3), At(4)],  # in the window after a checkpoint
        [At(2), At(7), At(14), At(20), At(23)],
    ],
    ids=["at_the_start", "in_validation", "at_a_checkpoint", "five_times"],
)
def test_cut_anywhere(world_size: int, cuts: list[At]) -> None:
    assert_exact(Setting(epoch_samples=92 // 2 * world_size), cuts, world_size)
