"""Loader workers: they die with their rank, and the user's code in them finds what it expects."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.unit.reading import feed_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


class Worker(Dataset[int]):
    """Gives the process that reads it."""

    greeted = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid() if index < 4 else self.greeted


def greet(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.greeted = 100 + worker  # type: ignore[attr-defined]


class TestWorkers:
    @pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
    def test_the_users_worker_init_fn_is_called_and_finds_the_users_dataset(self, context: str) -> None:
        loader = DataLoader(
            Worker(), batch_size=4, num_workers=1, worker_init_fn=greet, multiprocessing_context=context
        )
        feed = feed_of(loader, 0, 1)
        feed.begin_epoch(0)
        assert feed.take().batch.tolist()[0] != os.getpid()
        assert feed.take().batch.tolist() == [100] * 4

    @pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
    def test_no_signal_of_a_scheduler_ends_a_loader_worker_but_its_rank_can(self, context: str) -> None:
        """A scheduler sends it to every process; the rank still needs its batches to come to a step's end."""
        loader = DataLoader(Worker(), batch_size=1, num_workers=1, multiprocessing_context=context)
        feed = feed_of(loader, 0, 1)
        feed.begin_epoch(0)
        first = feed.take()
        assert first.error is None, first.error
        worker = first.batch.item()
        for number in ("TERM", "USR1"):
            subprocess.run(["kill", f"-{number}", str(worker)], check=True)
        assert [feed.take().batch.item() for _ in range(3)] == [worker] * 3
        process = next(child for child in multiprocessing.active_children() if child.pid == worker)
        process.terminate()
        process.join(10)
        assert process.exitcode == -signal.SIGKILL

    @pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
    def test_loader_workers_die_with_their_rank(self, context: str) -> None:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        # a forked rank would take its parent's fork server for its own
        start = multiprocessing.get_context("spawn" if context == "forkserver" else "fork")
        rank = start.Process(target=_hold_workers, args=(sender, context))  # type: ignore[attr-defined]
        rank.start()
        assert receiver.poll(60), "the rank did not start its loader workers"
        workers = receiver.recv()
        assert len(workers) == 2
        assert all(_runs(pid) for pid in workers)
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGKILL)
        rank.join()
        # torch's own workers look for their parent every 5 s only; while they live they hold the device and the files
        deadline = time.monotonic() + 4
        while any(_runs(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(_runs(pid) for pid in workers)


def _hold_workers(sender: Any, context: str) -> None:
    loader = DataLoader(Worker(), batch_size=1, num_workers=2, multiprocessing_context=context)
    feed = feed_of(loader, 0, 1)
    feed.begin_epoch(0)
    sender.send(sorted({feed.take().batch.item() for _ in range(4)}))
    time.sleep(60)


def _runs(pid: int) -> bool:
    """Whether a process is there and not a zombie that only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
