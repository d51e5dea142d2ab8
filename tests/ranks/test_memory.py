"""A rank that leaks is named with its rate; a rank that runs out of memory says which tensors held it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safetrain
import safetrain.limits
from safetrain.comm import Comm
from safetrain.errors import TrainingStopped
from safetrain.observer import Event
from safetrain.policies import OutOfMemoryStop, Policies
from safetrain.testing import run_ranks
from tests.ranks.outcome import Place, warnings_of_safetrain
from tests.ranks.test_timing import Events
from tests.ranks.toys import Classifier, dataset, mlp, momentum_sgd

LEAK_MIB, LEFT_MIB, STEPS = 12, 4800, 12


class Leaks(Classifier):
    """Keeps a tensor at every step on one rank, and ends long before the steps that it was asked for."""

    culprit = 0

    def training_step(self, batch: Any) -> Any:
        if self.comm.rank == self.culprit:
            self.__dict__.setdefault("kept", []).append(torch.ones(LEAK_MIB << 18))
        if self.step == STEPS - 1:
            self.stop()
        return super().training_step(batch)


def leak(comm: Comm, culprit: int) -> list[Event]:
    safetrain.limits.memory_left = lambda *_: LEFT_MIB << 20  # type: ignore[assignment]
    events = Events()
    trainer = Leaks(
        mlp(),
        dataset(512),
        optimizer=momentum_sgd,
        loop=safetrain.Loop(max_steps=900, epochs=999, log_every_steps=2),
        loader=safetrain.Loader(batch_size=2),
        observers=[events],
    )
    trainer.culprit = culprit
    trainer.fit()
    return events.told


def test_a_rank_that_leaks_is_named_with_its_rate(place: Place) -> None:
    for events in run_ranks(leak, place.world_size, place.culprit):
        (text,) = [event.text for event in events if event.kind == "memory" and "will run out" in event.text]
        found = re.match(
            r"memory will run out: rank (\d)'s host memory grows by ([\d.]+) MiB a step; the 4.69 GiB left on its "
            r"machine are full in about (\d+) steps\.", text
        )  # fmt: skip
        assert found is not None, text
        assert int(found[1]) == place.culprit
        assert float(found[2]) == pytest.approx(LEAK_MIB, rel=0.1)
        assert int(found[3]) == pytest.approx(LEFT_MIB / LEAK_MIB, rel=0.1)
        metrics = [event.metrics for event in events if event.kind == "train"][-1]
        assert metrics["memory/host_peak_rank"] == place.culprit
        assert metrics["memory/host_left_mib"] == LEFT_MIB
        assert metrics["memory/forward_mib"] > 0
        assert metrics["memory/host_peak_mib"] > LEAK_MIB * STEPS


def test_a_healthy_run_is_not_told_of_memory_but_at_its_end(world_size: int) -> None:
    for events in run_ranks(leak, world_size, -1):
        (text,) = [event.text for event in events if event.kind == "memory"]
        assert re.fullmatch(
            r"memory at its peak: [\d.]+ [MG]iB of [\d.]+ GiB on the host \(rank \d\)(; most .*|\.)", text
        )


class RunsOut(Classifier):
    culprit = 0

    def training_step(self, batch: Any) -> Any:
        if self.step == 2 and self.comm.rank == self.culprit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a test)")
        return super().training_step(batch)


def run_out(comm: Comm, culprit: int, run_dir: Path) -> tuple[str, list[str]]:
    torch.manual_seed(0)
    trainer = RunsOut(
        nn.Sequential(nn.Linear(8, 500), nn.ReLU(), nn.Linear(500, 300), nn.ReLU(), nn.Linear(300, 4)),
        dataset(512),
        optimizer=momentum_sgd,
        policies=Policies(out_of_memory=OutOfMemoryStop()),
        loop=safetrain.Loop(max_steps=9),
        checkpoint=safetrain.Checkpoint(at_failure_s=0),
        loader=safetrain.Loader(batch_size=2),
        run_dir=run_dir,
    )
    trainer.culprit = culprit
    with warnings_of_safetrain() as warnings, pytest.raises(TrainingStopped) as stopped:
        trainer.fit()
    return str(stopped.value), list(warnings)


def test_out_of_memory_names_the_largest_parameter(place: Place, tmp_path: Path) -> None:
    name = f"out_of_memory_rank_{place.culprit}.txt"
    for rank, (message, warnings) in enumerate(run_ranks(run_out, place.world_size, place.culprit, tmp_path)):
        assert message.startswith(f"stopped at step 2: out of memory (rank {place.culprit}), 1 window(s) in a row")
        assert message.endswith(f" Who held the memory: {tmp_path / 'memory' / name}")
        told = [text for text in warnings if "the largest tensor is 2.weight (parameter), 586 KiB" in text]
        assert len(told) == (rank == place.culprit), warnings
    assert [path.name for path in (tmp_path / "memory").iterdir()] == [name]
    lines = (tmp_path / "memory" / name).read_text().splitlines()
    assert lines[0].startswith(
        f"rank {place.culprit} was out of memory in training_step, at step 2: CUDA out of memory"
    )
    largest = lines[lines.index("The largest:") + 1 :]
    assert largest[0].split() == ["586", "KiB", "parameter", "2.weight", "300x500", "float32"]
    assert largest[1].split() == ["586", "KiB", "optimizer", "2.weight.momentum_buffer", "300x500", "float32"]
