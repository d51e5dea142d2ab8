"""A disk that is full, read-only or gone while a run saves: it trains on with a warning, up to a limit; or it stops."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from safetrain import archive, checkpoint
from safetrain.checkpoint import Checkpoints
from safetrain.comm import Comm
from safetrain.config import Checkpoint
from safetrain.errors import CheckpointError
from safetrain.shelf import Shelf
from safetrain.testing import run_ranks
from tests.states import assert_equal, shared_state, snapshot

_DISK_KIB = 256


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, as small as can be."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_KIB}k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


class Log(logging.Handler):
    """Warnings of safetrain, from any thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("safetrain").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_only(folder: Path, step: int) -> None:
    """The checkpoint of ``step`` is whole, and nothing lies beside it."""
    assert {path.name for path in folder.iterdir()} == {f"step_{step}", "latest"}
    found = Shelf(folder).newest_good()
    assert found is not None
    assert found[1].step == step
    assert_equal(archive.read_shared(found[0]), shared_state(step))


def fill(disk: Path, room: int) -> None:
    """Leave so many bytes."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        file.truncate(file.tell() - room)


@pytest.mark.parametrize("room", [0, 4096, 3 * 4096, 6 * 4096], ids="{} bytes left".format)
def test_a_full_disk_is_told_and_training_goes_on_until_there_is_room(disk: Path, room: int) -> None:
    folder = disk / "checkpoints"

    def work(comm: Comm) -> list[str]:
        log = Log()
        checkpoints = Checkpoints(folder, comm, Checkpoint(keep_last=1, max_failures=2))
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        comm.barrier("saved")
        if comm.rank == 0:
            fill(disk, room)
        comm.barrier("full")
        for step in (2, 3):
            checkpoints.save(snapshot(step, comm.rank))
        checkpoints.finish()
        check_only(folder, 1)
        comm.barrier("looked")
        if comm.rank == 0:
            (disk / "ballast").unlink()
        comm.barrier("room")
        for step in (4, 5):  # a save that went well: the count begins again
            checkpoints.save(snapshot(step, comm.rank))
        checkpoints.finish()
        check_only(folder, 5)
        return log.lines

    lines, others = run_ranks(work, 2)
    assert others == []
    assert len(lines) == 2
    for line in lines:
        assert "can't write a checkpoint: OSError: [Errno 28] No space left on device" in line
        assert line.startswith("rank ")
        assert line.endswith("; earlier checkpoints are as they were")


@pytest.mark.exhaustive
def test_a_disk_that_becomes_read_only(disk: Path) -> None:
    folder = disk / "checkpoints"

    def work(comm: Comm) -> str:
        checkpoints = Checkpoints(folder, comm, Checkpoint(max_failures=2))
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        comm.barrier("saved")
        if comm.rank == 0:
            remount(disk, "ro")
        comm.barrier("read-only")
        for step in (2, 3, 4):
            checkpoints.save(snapshot(step, comm.rank))
        with pytest.raises(CheckpointError) as stopped:
            checkpoints.save(snapshot(5, comm.rank))
        check_only(folder, 1)
        return str(stopped.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert first.startswith("step 4 was not saved: rank 0 on ")
    assert "Read-only file system" in first
    assert first.endswith("That was failure 3 in a row, and checkpoint.max_failures=2.")


def test_the_folder_vanishes_and_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(comm: Comm) -> None:
        checkpoints = Checkpoints(folder, comm, Checkpoint())
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        comm.barrier("saved")
        if comm.rank == 0:
            shutil.rmtree(folder)
        comm.barrier("gone")
        checkpoints.save(snapshot(2, comm.rank), wait=True)
        check_only(folder, 2)

    run_ranks(work, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_folder_vanishes_during_a_save(tmp_path: Path, culprit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write_own = tmp_path / "checkpoints", archive.write_own

    def work(comm: Comm) -> list[str]:
        def removing(draft: Path, rank: int, own: dict[str, object]) -> Path:
            if rank == culprit:
                shutil.rmtree(folder)
            return write_own(draft, rank, own)

        log = Log()
        checkpoints = Checkpoints(folder, comm, Checkpoint())
        archive.write_own = removing  # type: ignore[assignment]
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        archive.write_own = write_own
        comm.barrier("failed")
        checkpoints.save(snapshot(2, comm.rank), wait=True)
        check_only(folder, 2)
        return log.lines

    (line,), others = run_ranks(work, 2)
    assert others == []
    assert "can't write a checkpoint" in line


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_stop_stops_all_ranks_at_the_same_step(
    tmp_path: Path, culprit: int, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_own = archive.write_own

    def failing(folder: Path, rank: int, own: dict[str, object]) -> Path:
        if rank == culprit:
            raise OSError(28, "No space left on device")
        return write_own(folder, rank, own)

    monkeypatch.setattr(archive, "write_own", failing)

    def work(comm: Comm) -> tuple[int, str]:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint(on_error="stop", asynchronous=asynchronous))
        step = 0
        try:
            while True:
                step += 1
                checkpoints.save(snapshot(step, comm.rank))
        except CheckpointError as error:
            return step, str(error)

    first, second = run_ranks(work, 2)
    assert first == second
    step, text = first
    assert step == (2 if asynchronous else 1)
    assert text.startswith(f"step 1 was not saved: rank {culprit} on ")
    assert text.endswith("No space left on device. To train on without, set checkpoint.on_error=warn.")


def test_a_disk_that_does_not_answer_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(checkpoint, "_GRACE_S", 0.2)
    monkeypatch.setattr(checkpoint, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(archive, "write_shared", lambda *_: threading.Event().wait(30))

    def work(comm: Comm) -> str:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint(timeout_s=1))
        checkpoints.save(snapshot(1, comm.rank))
        with pytest.raises(CheckpointError) as stopped:
            checkpoints.finish()
        return str(stopped.value)

    (text,) = run_ranks(work, 1)
    assert text.startswith("the checkpoint of step 1 has not been written in 1 s: does the disk under ")
