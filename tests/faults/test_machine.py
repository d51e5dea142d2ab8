"""A machine that runs out of memory, or of shared memory: for real, where this test may arrange it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.gauntlet import write_project

pytestmark = pytest.mark.slow

_LIMIT_S = 90.0
_PROMISED_S = 5.0 + 3.0  # the second: other work on this machine
_GROUPS = Path("/sys/fs/cgroup/memory")
_SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]


def run_job(folder: Path, *arguments: str, within: Sequence[str] = (), **environment: str) -> tuple[int, str]:
    """Exit code and all that was said; the job ends soon after it has touched ``struck``."""
    job = [sys.executable, "-m", "safetrain", "recipe=mine", "launch.nproc_per_node=2", *arguments]
    done = subprocess.run(
        [*within, *job], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    assert time.time() - (folder / "struck").stat().st_mtime < _PROMISED_S, done.stdout
    return done.returncode, done.stdout


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 100 MB."""
    group = _GROUPS / f"safetrain_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(100_000_000))
    except OSError:
        pytest.skip("needs a memory cgroup (version 1) that it may make groups in")
    yield group
    with suppress(OSError):
        group.rmdir()


def test_the_out_of_memory_killer_ends_a_rank(tmp_path: Path, small_group: Path) -> None:
    write_project(tmp_path)
    source = tmp_path / "mine.py"
    hoard = (
        "        if self.step == 2 and self.comm.rank == 1:\n"
        "            import os, pathlib\n"
        "            pathlib.Path(os.environ['GROUP'], 'tasks').write_text(str(os.getpid()))\n"
        "            pathlib.Path('struck').touch()\n"
        "            self.hoard = b'x' * 300_000_000\n"
    )
    head = "    def training_step(self, batch):\n"
    source.write_text(source.read_text().replace(head, head + hoard))
    code, said = run_job(tmp_path, GROUP=str(small_group))
    assert code == 1
    assert "Training failed: rank 1 (process" in said
    assert "was killed by SIGKILL. As a rule the machine or the container ran out of memory" in said


@pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run([*_SMALL_SHM, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a mount namespace of its own",
)
def test_shared_memory_is_full(tmp_path: Path) -> None:  # H71
    write_project(tmp_path)
    source = tmp_path / "mine.py"
    text = source.read_text().replace(
        "        return torch.full((4,), index / 64)\n",
        "        import pathlib\n"
        "        if not pathlib.Path('struck').exists():\n"
        "            pathlib.Path('struck').touch()\n"
        "        return torch.full((500_000,), index / 64)\n",
    )
    source.write_text(text.replace("self.model(batch)", "self.model(batch[:, :4])"))
    code, said = run_job(tmp_path, "loader.num_workers=1", within=_SMALL_SHM)
    assert code == 1
    assert "Likely cause: /dev/shm, through which loader processes hand over their batches, is full" in said
    assert "--shm-size" in said
    assert "loader.num_workers" in said
