"""Where the time of a step goes is told at every logging interval, and a rank that the others wait for is named."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import safetrain
from safetrain.activity import ACTIVITY
from safetrain.comm import Comm
from safetrain.observer import Event, RunInfo
from safetrain.testing import run_ranks
from tests.ranks.toys import momentum_sgd

SLOW_S = 0.08
EVEN_S = 0.01


class Events:
    def __init__(self) -> None:
        self.told: list[Event] = []

    def start(self, run: RunInfo) -> None: ...
    def step(self, step: int, epoch: int) -> None: ...
    def event(self, event: Event) -> None:
        self.told.append(event)

    def close(self) -> None: ...


class Numbers(Dataset[Any]):
    def __init__(self, slow: bool) -> None:
        self._slow = slow

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> Any:
        if self._slow:
            time.sleep(SLOW_S / 2)  # there are two in a batch
        return torch.full((4,), index / 64)


class Slow(safetrain.Trainer):
    """One rank takes its time in ``part``."""

    part, culprit = "", 0

    def training_step(self, batch: Any) -> Any:
        if self.part == "forward" and self.comm.rank == self.culprit:
            time.sleep(SLOW_S)
        loss = self.model(batch).square().mean()
        if self.part == "backward" and self.comm.rank == self.culprit:
            loss.register_hook(lambda _: time.sleep(SLOW_S))
        return loss


def told(comm: Comm, part: str, culprit: int, model: nn.Module) -> list[Event]:
    events = Events()
    trainer = Slow(
        model,
        Numbers(slow=part == "data" and comm.rank == culprit),
        optimizer=momentum_sgd,
        loop=safetrain.Loop(max_steps=30, epochs=99, log_every_steps=2),
        loader=safetrain.Loader(batch_size=2),
        observers=[events],
    )
    trainer.part, trainer.culprit = part, culprit
    trainer.fit()
    return events.told


@pytest.mark.parametrize("part", ["data", "forward", "backward"])
@pytest.mark.parametrize(
    "model", [nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))], ids=["", "buffers"]
)
@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_h108_a_slow_rank_is_named_with_the_part_that_is_slow(
    part: str, world_size: int, culprit: int, model: nn.Module
) -> None:
    """All ranks' steps take equally long, since they wait for each other, also at the broadcast of buffers before
    forward; only its own work tells who it is."""
    for events in run_ranks(told, world_size, part, culprit, model):
        texts = [event.text for event in events if event.kind == "timing"]
        named = [text for text in texts if text.startswith(f"rank {culprit} is slower")]
        assert len(named) == 1, texts
        assert f"The difference is in {part}: " in named[0]
        summary = texts[-1]
        assert summary.startswith("a step took ")
        means = [event.metrics for event in events if event.kind == "train"]
        assert len(means) == 15
        for metrics in means:
            assert metrics[f"time/{part}_ms"] > 1000 * SLOW_S / world_size
            assert metrics["time/communication_ms"] > 0


class Even(safetrain.Trainer):
    def training_step(self, batch: Any) -> Any:
        time.sleep(EVEN_S)
        return self.model(batch).square().mean()


def in_short_epochs(_comm: Comm) -> list[Event]:
    events = Events()
    Even(
        nn.Linear(4, 2),
        Numbers(slow=False),
        optimizer=momentum_sgd,
        loop=safetrain.Loop(epochs=3, log_every_steps=3),
        loader=safetrain.Loader(batch_size=16),
        observers=[events],
    ).fit()
    return events.told


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_interval_in_which_an_epoch_begins_has_the_time_of_its_own_steps(world_size: int) -> None:
    """The clock begins anew with an epoch, so such an interval has fewer steps than a line of the log."""
    for events in run_ranks(in_short_epochs, world_size):
        forward_ms = [event.metrics["time/forward_ms"] for event in events if event.kind == "train"]
        assert len(forward_ms) == 8 // world_size  # 128 samples, 16 a rank and step, 3 epochs, 3 steps a line
        assert min(forward_ms) >= 1000 * EVEN_S, forward_ms
        said = next(event.text for event in events if event.text.startswith("a step took "))
        assert float(said.split()[3]) >= 1000 * EVEN_S


class FailsToTell(Events):
    """An observer that can't be told how a run ended."""

    closed = False

    def event(self, event: Event) -> None:
        if event.kind == "failed":
            raise OSError("no disk")

    def close(self) -> None:
        self.closed = True


class Breaks(Even):
    where = ""

    def training_step(self, batch: Any) -> Any:
        if self.where == "training_step":
            raise ValueError("mine")
        return super().training_step(batch)

    def build_schedulers(self) -> dict[str, Any]:
        if self.where == "build_schedulers":
            raise ValueError("mine")
        return super().build_schedulers()


def end_badly(_comm: Comm, where: str) -> tuple[str, bool, int]:
    observer = FailsToTell()
    trainer = Breaks(
        nn.Linear(4, 2), Numbers(slow=False), optimizer=momentum_sgd, observers=[observer],
        loop=safetrain.Loop(log_every_steps=1),
    )  # fmt: skip
    trainer.where = where
    with pytest.raises((ValueError, safetrain.RankFailed)) as caught:
        trainer.fit()
    return str(caught.value), observer.closed, len(ACTIVITY.listeners)


@pytest.mark.parametrize("where", ["training_step", "build_schedulers"])
def test_whatever_ends_a_run_its_observers_are_closed_and_nothing_listens_to_the_loop(where: str) -> None:
    """Or a second run in the same process would be measured by the first one's meters, too."""
    for said, closed, listeners in run_ranks(end_badly, 2, where):
        assert "mine" in said
        assert (closed, listeners) == (True, 0)
