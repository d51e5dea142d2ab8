"""A user's project in a folder of its own, and ``python -m safetrain`` run in it for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

LIMIT_S = 90.0  # for a whole command; three processes import torch on a loaded machine
_GONE_S = 5.0  # what is promised: no process is left after that

_MINE = '''
import os, signal, sys, threading, time
from pathlib import Path
import torch
import safetrain

class Numbers(torch.utils.data.Dataset):
    def __init__(self, size=32):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return torch.full((4,), index / self.size)

class Mine(safetrain.Trainer):
    """Does ``fault`` on rank ``culprit`` at step number ``at``."""
    def __init__(self, *, fault="", culprit=0, at=1, **parts):
        super().__init__(**parts)
        self.fault, self.culprit, self.at = fault, culprit, at
    def training_step(self, batch):
        Path(self.run_dir, f"stepping_{self.comm.rank}").touch()
        if self.step == self.at and self.comm.rank == self.culprit and self.fault and "validation" not in self.fault:
            getattr(self, self.fault)()
        return self.model(batch).square().mean()
    def validation_step(self, batch):
        if self.step == self.at and self.comm.rank == self.culprit and self.fault == "wait_in_validation":
            Path(self.run_dir, "waiting").touch()
            while not self._leave.wanted:
                time.sleep(0.02)
        self.log("loss", self.model(batch).square().mean(dim=1))
    def error(self):
        raise ValueError("bad label 12")  # the line that the summary must name
    def error_beside_a_thread(self):
        threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
        raise ValueError("bad label 13")
    def leave(self):
        os._exit(3)
    def leave_quietly(self):
        os._exit(0)
    def system_exit(self):
        sys.exit(7)
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def die_once(self):
        if not Path(self.run_dir, "died").exists():
            Path(self.run_dir, "died").touch()
            self.die()
    def hold_on(self):
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if self.comm.rank != 0:
            os._exit(3)
        time.sleep(600)
    def wait(self):
        Path(self.run_dir, "waiting").touch()
        while not Path("go_on").exists():
            time.sleep(0.02)
    def fail_after_waiting(self):
        self.wait()
        self.error()
    def sleep(self):
        time.sleep(600)
'''
_RECIPE = """# @package _global_
# A user's own recipe.
trainer: {_target_: mine.Mine, fault: "", culprit: 0, at: 1}
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}
data:
  train: {_target_: mine.Numbers}
  val: {_target_: mine.Numbers, size: 6}
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}
loop: {max_steps: 3}
loader: {batch_size: 4}
observers: {progress: null, tensorboard: null}
launch: {nproc_per_node: 2}
device: cpu
metric: val/loss
"""


@dataclass
class Command:
    """A finished command."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass
class Project:
    """A user's folder with ``mine.py`` and ``recipe/mine.yaml``."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    def create(cls, folder: Path) -> Self:
        (folder / "mine.py").write_text(_MINE)
        (folder / "recipe").mkdir()
        (folder / "recipe" / "mine.yaml").write_text(_RECIPE)
        return cls(folder)

    def start(self, *arguments: str, program: list[str] | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start ``python -m safetrain ARGUMENTS`` (or ``program``) in the folder, in a session of its own."""
        command = [*(program or [sys.executable, "-m", "safetrain"]), *arguments]
        process = in_a_session(command, self.folder, environment)
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> Command:
        """Wait for a command; the time is counted from here."""
        begin = time.monotonic()
        out, err = process.communicate(timeout=LIMIT_S)
        return Command(process.returncode, out, err, time.monotonic() - begin)

    def run(self, *arguments: str, program: list[str] | None = None, **environment: str) -> Command:
        return self.finish(self.start(*arguments, program=program, **environment))

    def run_dirs(self) -> list[Path]:
        """The run directories, oldest first."""
        return sorted(
            path.parent for path in self.folder.glob("outputs/**/config.yaml") if path.parent.name != ".hydra"
        )

    def ranks(self) -> list[int]:
        """The processes of ranks that were started on a config of this folder; their forked children look alike."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and str(self.folder) in _command_line(entry):
                found.append(int(entry.name))
        return found

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            for process in self.started:
                assert process.poll() is None, f"ended before {what}:\n{process.communicate()}"
            assert time.monotonic() < deadline, f"{what} did not happen"
            time.sleep(0.02)

    def wait_until_training(self, ranks: int = 2) -> None:
        """Return when every rank has begun its first step."""
        self.wait_for(lambda: len(list(self.folder.glob("outputs/*/*/stepping_*"))) == ranks, "training")

    def gone(self) -> bool:
        """Whether no rank is left, after waiting as long as is promised."""
        deadline = time.monotonic() + _GONE_S
        while self.ranks():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def in_a_session(
    command: list[str], folder: Path, environment: dict[str, str], *, stderr: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start a command in ``folder``, in a session of its own."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_ctrl_c,
    )


def _hear_ctrl_c() -> None:
    """Tests may run in a shell's background, where SIGINT is ignored, and so it would be in what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _command_line(process: Path) -> str:
    try:
        if process.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return ""
        return process.joinpath("cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
