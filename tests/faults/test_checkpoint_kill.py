"""A process that is killed while it saves (H83): at every operation on files, at any byte, at any instant.

Whatever it was, the checkpoint before is there, or the new one is whole; `latest` points to one of them; the next save
goes well and leaves nothing of the cut one.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain import writer
from safetrain.checkpoint import Checkpoints, find, read
from safetrain.comm import Comm
from safetrain.config import Checkpoint
from safetrain.shelf import Keep, Shelf
from safetrain.testing import RankError, run_ranks
from tests.states import assert_equal, checkpoint_at, own_state, shared_state, snapshot

_FILE_OPERATIONS = ("open", "os.", "shutil.")  # what Python's audit events of them begin with
_KEEP = Keep(last=1)  # the hardest: the old one goes as soon as the new one is there


def in_a_child(prepare: Callable[[], None], folder: Path, step: int) -> int | None:
    """Save there, after ``prepare``; the exit code."""

    def work() -> None:
        prepare()
        checkpoint_at(folder, step, keep=_KEEP)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    return process.exitcode


def kill_at_operation(count: int) -> Callable[[], None]:
    """Arrange for SIGKILL before the ``count``-th operation on a file or folder."""
    left = iter(range(count - 1, -1, -1))

    def hook(event: str, _arguments: object) -> None:
        if event.startswith(_FILE_OPERATIONS) and next(left, None) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(hook)


def kill_at_byte(count: int) -> Callable[[], None]:
    """Arrange for a kill when some file is about to grow beyond ``count`` bytes."""

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))

    return prepare


def check(folder: Path, old: int, new: int) -> int:
    """The step of what there is: all of it as it was saved."""
    path, manifest = find(folder / "latest")
    newest = Shelf(folder).newest_good()
    assert newest is not None
    assert manifest.step in (old, new)
    assert newest[1].step in (old, new)
    for saved in (read(path, manifest), read(*newest)):
        assert_equal(saved.shared, shared_state(saved.step))
        assert_equal(saved.own, (own_state(saved.step, 0),))
    return newest[1].step


def check_and_go_on(folder: Path, old: int, new: int) -> int:
    step = check(folder, old, new)
    checkpoint_at(folder, new + 1, keep=_KEEP)
    assert {path.name for path in folder.iterdir()} == {f"step_{new + 1}", "latest"}
    return step


def test_at_every_operation_on_files(tmp_path: Path) -> None:
    found = set()
    for count in range(1, 500):
        folder = tmp_path / str(count)
        checkpoint_at(folder, 1, keep=_KEEP)
        exit_code = in_a_child(kill_at_operation(count), folder, 2)
        found.add(check_and_go_on(folder, 1, 2))
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
    assert exit_code == 0
    assert count > 40, "too few operations were seen for this to be a save"
    assert found == {1, 2}


@pytest.mark.exhaustive
def test_at_every_operation_where_a_step_is_saved_again(tmp_path: Path) -> None:
    for count in range(1, 500, 3):
        folder = tmp_path / str(count)
        checkpoint_at(folder, 1, keep=_KEEP)
        exit_code = in_a_child(kill_at_operation(count), folder, 1)
        check(folder, 1, 1)
        if exit_code == 0:
            break
    assert exit_code == 0


def test_at_any_byte(tmp_path: Path) -> None:
    whole = checkpoint_at(tmp_path / "whole", 1)
    sizes = [file.stat().st_size for file in whole.iterdir()]
    numbers = random.Random(0)
    # within each file, at its borders, and anywhere
    counts = [0, 1, *(size - 1 for size in sizes), *(numbers.randrange(max(sizes)) for _ in range(20))]
    for index, count in enumerate(counts):
        folder = tmp_path / str(index)
        checkpoint_at(folder, 1, keep=_KEEP)
        assert in_a_child(kill_at_byte(count), folder, 2) == -signal.SIGXFSZ
        assert check_and_go_on(folder, 1, 2) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_of_two_ranks_at_any_instant(tmp_path: Path, culprit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank dies while both save, again and again; the next run loads what is there."""
    monkeypatch.setattr(writer, "_GRACE_S", 0.5)  # the other one waits for it in vain
    options = Checkpoint(keep_last=2, timeout_s=2, on_error="stop")
    numbers = random.Random(culprit)

    def work(comm: Comm, die_after_s: float) -> None:
        checkpoints = Checkpoints(tmp_path, comm, options)
        saved = checkpoints.load("auto")
        step = 0
        if saved is not None:
            step = saved.step
            assert_equal(saved.shared, shared_state(step))
            assert_equal(saved.own, tuple(own_state(step, rank) for rank in range(2)))
        comm.barrier("loaded")
        if comm.rank == culprit:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, die_after_s)
        while True:
            step += 1
            checkpoints.save(snapshot(step, comm.rank), wait=True)
            comm.agree(step, "max")

    for _ in range(6):
        with pytest.raises(RankError) as ended:
            run_ranks(work, 2, numbers.uniform(0.001, 0.6), timeout_s=20)
        assert "died with exit code -14" in ended.value.errors[culprit]
    found = Shelf(tmp_path).newest_good()
    assert found is not None
    assert found[1].step > 3
