"""No healthy job is ever ended: what takes long, but moves, or may take long, is left alone. And a watchdog that is
itself in trouble ends the job when, and only when, the job is in trouble, too.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import safetrain
from safetrain.comm import Comm
from safetrain.testing import RankError, run_ranks
from tests.ranks.toys import Classifier, dataset, mlp, momentum_sgd

STALL_S = 0.6
OPTIONS = safetrain.Watchdog(stall_s=STALL_S, first_step_stall_s=10, poll_s=0.05)
LONG_S = 3 * STALL_S
ROOT = Path(__file__).parents[2]


class Slow(Classifier):
    """One rank is slow where it may be; all must come to the end."""

    def __init__(self, slow_rank: int, steps: int = 8, **arguments: Any) -> None:
        arguments.setdefault("watchdog", OPTIONS)
        super().__init__(mlp(), dataset(32 * 4 * steps), optimizer=momentum_sgd, **arguments)
        self.slow_rank = slow_rank

    @property
    def is_slow(self) -> bool:
        return self.comm.rank == self.slow_rank


class SlowFirstStep(Slow):
    def training_step(self, batch: Any) -> Any:
        if self.is_slow and self.step == 0:
            time.sleep(LONG_S)
        return super().training_step(batch)


class SlowBuild(Slow):
    def build_model(self) -> torch.nn.Module:
        if self.is_slow:
            time.sleep(LONG_S)
        return super().build_model()


class LongValidation(Slow):
    """Far longer than the limit, in steps of which each is shorter; the other rank is through at once."""

    def __init__(self, slow_rank: int, **arguments: Any) -> None:
        super().__init__(slow_rank, val_data=dataset(512), **arguments)

    def validation_step(self, batch: Any) -> None:
        if self.is_slow:
            time.sleep(STALL_S / 2)
        super().validation_step(batch)


class LongFirstValidationStep(LongValidation):
    def validation_step(self, batch: Any) -> None:
        if self.is_slow and not hasattr(self, "seen"):
            self.seen = time.sleep(LONG_S)
        super().validation_step(batch)


class SlowButMoving(Slow):
    def training_step(self, batch: Any) -> Any:
        if self.is_slow:
            time.sleep(0.8 * STALL_S)
        return super().training_step(batch)


class SlowerAndSlower(Slow):
    """Steps grow to far over the limit, each less than ten times as long as those before."""

    def training_step(self, batch: Any) -> Any:
        if self.is_slow:
            time.sleep({4: 0.4, 5: LONG_S, 6: 2 * LONG_S}.get(self.step, 0.0))
        return super().training_step(batch)


class Section(Slow):
    """Rank 0 exports; the others wait. Once in a step, and once where no phase was ever before."""

    def training_step(self, batch: Any) -> Any:
        if self.step == 4:
            with self.comm.rank_zero("export", limit_s=10) as mine:
                if mine:
                    time.sleep(LONG_S)
        return super().training_step(batch)


class HoldsTheInterpreter(Slow):
    """For less than the limit."""

    def training_step(self, batch: Any) -> Any:
        if self.is_slow and self.step in (3, 5):
            ctypes.PyDLL(None).usleep(int(0.7e6 * STALL_S))
        return super().training_step(batch)


class AtThePrompt(Slow):
    """A debugger that some other tool started."""

    def training_step(self, batch: Any) -> Any:
        if self.is_slow and self.step == 4:
            code = compile("import time; time.sleep(seconds)", "/somewhere/pdb.py", "exec")
            exec(code, {"seconds": LONG_S})
        return super().training_step(batch)


class UnderLoad(Slow):
    """Random delays, in every phase, on every rank."""

    def training_step(self, batch: Any) -> Any:
        if random.random() < 0.1:
            time.sleep(random.random() * 0.5 * STALL_S)
        return super().training_step(batch)


CASES = [
    SlowFirstStep,
    pytest.param(SlowBuild, marks=pytest.mark.exhaustive),
    LongValidation,
    pytest.param(LongFirstValidationStep, marks=pytest.mark.exhaustive),
    SlowButMoving,
    pytest.param(SlowerAndSlower, marks=pytest.mark.exhaustive),
    Section,
    HoldsTheInterpreter,
    pytest.param(AtThePrompt, marks=pytest.mark.exhaustive),
    pytest.param(UnderLoad, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_no_false_alarm(case: type[Slow], slow_rank: int, tmp_path: Path) -> None:
    def work(comm: Comm) -> int:
        return case(slow_rank, run_dir=tmp_path).fit().step

    assert run_ranks(work, 2, timeout_s=60) == [16, 16]
    assert not (tmp_path / "failure.json").exists()


@pytest.mark.parametrize("world_size", [2, 4])
def test_nothing_of_a_watchdog_is_left_when_python_ends(world_size: int) -> None:
    """Else its thread may be the one to destroy a process group then, which aborts a job that was well."""

    def threads_left(comm: Comm) -> list[str]:
        Slow(slow_rank=-1).fit()
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("safetrain")]

    assert run_ranks(threads_left, world_size) == [[]] * world_size


def test_a_job_that_was_suspended_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z and fg: all ranks stop at once, for longer than the limit."""

    def suspend(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(LONG_S)
        os.kill(pid, signal.SIGCONT)

    class Suspended(Slow):
        def training_step(self, batch: Any) -> Any:
            if self.step == 4 and not hasattr(self, "seen"):
                self.seen = True
                pid = os.getpid()
                if os.fork() == 0:
                    suspend(pid)
                    os._exit(0)
            return super().training_step(batch)

    def work(comm: Comm) -> int:
        return Suspended(0, run_dir=tmp_path).fit().step

    assert run_ranks(work, 2, timeout_s=60) == [16, 16]
    assert not (tmp_path / "failure.json").exists()


# --- the watcher is itself watched ----------------------------------------------------------------------------------


def kill_thread(name: str) -> None:
    """Raise SystemExit in a thread of this process."""
    thread = next(thread for thread in threading.enumerate() if thread.name == name)
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    thread.join()


class Unwatched(Slow):
    """One rank's watchdog thread is killed; with ``stuck``, the rank is stuck after that."""

    stuck = False

    def training_step(self, batch: Any) -> Any:
        if self.is_slow and self.step == 4:
            kill_thread("safetrain-watch")
            if self.stuck:
                time.sleep(60)
        return super().training_step(batch)


class UnwatchedAndStuck(Unwatched):
    stuck = True


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_killed_watchdog_ends_no_healthy_job(slow_rank: int, tmp_path: Path) -> None:
    def work(comm: Comm) -> int:
        return Unwatched(slow_rank, run_dir=tmp_path).fit().step

    assert run_ranks(work, 2) == [16, 16]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_that_is_stuck_without_its_watchdog(world_size: int, tmp_path: Path) -> None:
    """With others, they find it silent; alone, the second thread does."""

    def work(comm: Comm) -> None:
        UnwatchedAndStuck(0, run_dir=tmp_path).fit()

    with pytest.raises(RankError) as raised:
        run_ranks(work, world_size, timeout_s=40)
    assert all("died with exit code" in text for text in raised.value.errors.values())
    assert "rank 0 is" in (tmp_path / "failure.txt").read_text()


def store_process() -> int:
    """What ``run_ranks`` starts before the ranks: the oldest child of their parent."""
    parent = os.getppid()
    assert parent > 1
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(min(children, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])))


class WithoutStore(Slow):
    """The process that serves the ranks' store gets a signal; with ``stuck``, one rank is stuck after that."""

    signal = signal.SIGKILL
    stuck = False

    def training_step(self, batch: Any) -> Any:
        if self.step == 4 and self.is_slow and not hasattr(self, "seen"):
            self.seen = os.kill(store_process(), self.signal)
            if self.stuck:
                time.sleep(60)
        return super().training_step(batch)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_without_its_store(number: signal.Signals, tmp_path: Path) -> None:
    """A healthy one goes on, while it has nothing to save; a stuck one ends, and each rank says what it knows."""

    class Healthy(WithoutStore):
        signal = number

    class Stuck(Healthy):
        stuck = True

    def work(comm: Comm, case: type[WithoutStore]) -> int:
        saves_nothing = safetrain.Checkpoint(every_minutes=None, every_epochs=None, at_end=False)
        return case(1, run_dir=tmp_path, checkpoint=saves_nothing).fit().step

    assert run_ranks(work, 2, Healthy, timeout_s=60) == [16, 16]
    with pytest.raises(RankError) as raised:
        run_ranks(work, 2, Stuck, timeout_s=40)
    assert all("died with exit code 1" in text for text in raised.value.errors.values())
    assert "the other ranks cannot be asked" in (tmp_path / "failure.txt").read_text()


def test_no_run_directory_takes_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A full disk, say: the verdict is on the terminal."""

    class Stuck(Slow):
        def training_step(self, batch: Any) -> Any:
            if self.is_slow and self.step == 4:
                time.sleep(60)
            return super().training_step(batch)

    def work(comm: Comm) -> None:
        Stuck(1, run_dir=Path("/dev/full")).fit()

    with pytest.raises(RankError):
        run_ranks(work, 2)
    told = capfd.readouterr().err
    assert "Training stalled: rank 1 is stuck in training_step at step 4" in told
    assert "/dev/full takes no file" in told


SCRIPT = """
import sys, time, torch, safetrain
from functools import partial
from torch.utils.data import TensorDataset

class Stuck(safetrain.Trainer):
    def training_step(self, batch):
        if self.step == 3 and self.comm.rank == int(sys.argv[1]):
            print("fault at", time.time(), flush=True)
            time.sleep(60)
        return self.model(batch[0]).sum()

data = TensorDataset(torch.ones(256, 4))
optimizer = partial(torch.optim.SGD, lr=0.1)
Stuck(torch.nn.Linear(4, 1), data, optimizer=optimizer, watchdog=safetrain.Watchdog(stall_s=1.5)).fit()
"""


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_plain_script_under_torchrun(culprit: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, str(script), str(culprit)],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    took_s = time.time() - float(ended.stdout.partition("fault at ")[2].split()[0])
    assert ended.returncode != 0
    assert took_s < 2 * (1.5 + 3)  # torchrun itself takes a while to end
    assert f"Training stalled: rank {culprit} is stuck in training_step at step 3" in ended.stderr
    assert f"{script}:10 in training_step" in ended.stderr
    assert ended.stderr.count("Training stalled") == 1
    assert f"Stack of rank {culprit}" in ended.stderr
