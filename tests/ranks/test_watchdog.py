"""A job that can't go on ends by itself, soon, and says who, where and what to do: on 2 and 4 ranks, on the first and
the last one. The words of a verdict are read from ``failure.json``, as the launcher reads them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import safetrain
from safetrain.comm import Comm
from safetrain.testing import RankError, run_ranks
from tests.ranks.toys import Classifier, dataset, mlp, momentum_sgd

STALL_S = 1.5
AT_MOST_S = 2 * (STALL_S + 3)  # twice what is promised: the machine may be loaded
STEP = 3
RANKS = pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (4, 0), (4, 3)])

Fault = Callable[["Faulty"], None]


class Faulty(Classifier):
    """Has a fault on one rank, in one step's ``training_step``, before its loss."""

    def __init__(self, fault: Fault, culprit: int, **arguments: Any) -> None:
        super().__init__(mlp(), dataset(512), optimizer=momentum_sgd, **arguments)
        self.fault, self.culprit = fault, culprit

    def training_step(self, batch: Any) -> Any:
        if self.step == STEP and self.comm.rank == self.culprit:
            note_time(self.run_dir)
            self.fault(self)
        return super().training_step(batch)


def note_time(run_dir: Path | None) -> None:
    assert run_dir is not None
    (run_dir / "fault").write_text(str(time.monotonic()))


def sleeps(trainer: Faulty) -> None:
    time.sleep(60)  # the line: sleeps


def waits_for_a_lock(trainer: Faulty) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # the line: lock


def holds_the_interpreter(trainer: Faulty) -> None:
    ctypes.PyDLL(None).sleep(60)  # the line: gil


def is_stopped(trainer: Faulty) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def reduces_alone(trainer: Faulty) -> None:
    dist.all_reduce(torch.ones(5))  # the line: alone


def broadcasts_if_it_has_no_path(trainer: Faulty) -> None:  # H11: the path comes from a logger of one rank
    dist.broadcast(torch.ones(3), src=0)  # the line: path


def line_of(mark: str) -> str:
    """``file:line`` of the line in this file that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# the line: {mark}'))}"


def verdict(
    tmp_path: Path, world_size: int, make: Callable[[Path], safetrain.Trainer], at_most_s: float = AT_MOST_S
) -> dict[str, Any]:
    """Run it: it must end in time; what it wrote."""

    def work(comm: Comm) -> None:
        make(tmp_path).fit()

    with pytest.raises(RankError) as raised:
        run_ranks(work, world_size, timeout_s=40)
    took_s = time.monotonic() - float((tmp_path / "fault").read_text())
    assert set(raised.value.errors) == set(range(world_size)), raised.value
    assert all("died with exit code" in text for text in raised.value.errors.values()), raised.value
    assert took_s < at_most_s
    found: dict[str, Any] = json.loads((tmp_path / "failure.json").read_text())
    assert (tmp_path / "failure.txt").read_text() == found["text"]
    print(f"{took_s:.2f} s\n{found['text']}")
    return found


def options() -> safetrain.Watchdog:
    return safetrain.Watchdog(stall_s=STALL_S, first_step_stall_s=30)


@RANKS
@pytest.mark.parametrize(
    ("fault", "state", "mark"),
    [
        (sleeps, "stuck in training_step at step 3", "sleeps"),
        (waits_for_a_lock, "stuck in training_step at step 3", "lock"),
        (holds_the_interpreter, "holding the interpreter in training_step at step 3", "gil"),
        (is_stopped, "stopped at step 3", ""),
    ],
)
def test_a_stuck_rank(tmp_path: Path, world_size: int, culprit: int, fault: Fault, state: str, mark: str) -> None:
    found = verdict(tmp_path, world_size, lambda run_dir: Faulty(fault, culprit, run_dir=run_dir, watchdog=options()))
    assert found["culprits"] == [culprit]
    assert f"rank {culprit} is {state}" in found["sentence"]
    if mark:
        assert found["place"].startswith(line_of(mark))
    assert len(found["others"]) == 1
    assert "all_reduce" in found["others"][0]
    assert "the gradients" in found["others"][0]


@RANKS
@pytest.mark.parametrize(
    ("fault", "call", "mark"),
    [
        (reduces_alone, "all_reduce of 5 floats", "alone"),
        (broadcasts_if_it_has_no_path, "broadcast of 3 floats", "path"),
    ],
)
def test_a_collective_on_one_rank_only(
    tmp_path: Path, world_size: int, culprit: int, fault: Fault, call: str, mark: str
) -> None:
    """The others wait for it in the gradients' reduction; the groups' own time limit is far away (H99)."""
    found = verdict(tmp_path, world_size, lambda run_dir: Faulty(fault, culprit, run_dir=run_dir, watchdog=options()))
    assert culprit in found["culprits"]
    assert found["culprits"] == [culprit] or world_size == 2
    assert f"{call} (the default group)" in found["sentence"]
    assert (f"only rank {culprit} came" if world_size > 2 else f"where rank {culprit} has waited") in found["sentence"]
    assert found["place"].startswith(line_of(mark))
    assert "the gradients" in found["others"][0]


class LeavesEarly(Faulty):
    """Returns past a barrier on one rank."""

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        if self.step == STEP:
            if self.comm.rank == self.culprit:
                return loss  # the line: return
            dist.barrier()  # the line: barrier
        return loss


def does_nothing(trainer: Faulty) -> None:
    pass


@RANKS
def test_a_return_past_a_barrier(tmp_path: Path, world_size: int, culprit: int) -> None:
    found = verdict(
        tmp_path, world_size, lambda run_dir: LeavesEarly(does_nothing, culprit, run_dir=run_dir, watchdog=options())
    )
    assert culprit in found["culprits"]
    assert found["culprits"] == [culprit] or world_size == 2
    assert f"rank {culprit} did not come to barrier (the default group)" in found["sentence"]
    assert found["place"].startswith(line_of("barrier"))
    assert f"the return at {line_of('return')} (if self.comm.rank == self.culprit)" in found["cause"]
    assert found["others"][0].startswith(f"Rank {culprit} waits in all_reduce")


class Stuck(torch.utils.data.Dataset[Any]):
    """Sleeps at one sample, on the culprit."""

    def __init__(self, run_dir: Path, culprit: int) -> None:
        self._data, self._run_dir, self._culprit, self._taken = dataset(512), run_dir, culprit, 0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self._taken += 1
        if self._taken == STEP * 32 and int(os.environ["RANK"]) == self._culprit:
            note_time(self._run_dir)
            time.sleep(60)  # the line: sample
        return self._data[index]


@RANKS
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stuck_dataset(tmp_path: Path, world_size: int, culprit: int, workers: int) -> None:
    """In the rank itself, or in a loader process: the line is known."""

    class Plain(Classifier):
        def __init__(self, run_dir: Path) -> None:
            super().__init__(
                mlp(), Stuck(run_dir, culprit), optimizer=momentum_sgd, run_dir=run_dir, watchdog=options(),
                loader=safetrain.Loader(num_workers=workers, shuffle=False),
            )  # fmt: skip

    found = verdict(tmp_path, world_size, Plain)
    assert found["culprits"] == [culprit]
    assert f"rank {culprit} is stuck" in found["sentence"]
    assert "fetching data" in found["sentence"]
    assert found["place"].startswith(line_of("sample"))
    assert ("a loader process" in found["sentence"]) == bool(workers)
