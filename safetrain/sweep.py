"""A sweep, seen from the command that was given: where its jobs are noted, how they end together, what became of each.

Jobs may run in this process (Hydra's own launcher), or in others, on this host or elsewhere (joblib, submitit). So each
notes itself in the sweep's folder, in ``.jobs/<number>.json``, which is all that this process knows of it, and holds a
lock beside it for as long as it runs. This process holds one, too: whoever gets it (the system gives it away however
this process ends) knows that the sweep is over.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from safetrain.errors import Preempted
from safetrain.orders import FAILED, OK, WRONG
from safetrain.run_dir import shown

COMMAND = uuid.uuid4().hex
"""Tells this command's jobs from what is in the same folder from an earlier time."""
SUBMITIT = "SUBMITIT_EXECUTOR"
"""The environment variable that says by which of its ways submitit has started this process: local, slurm."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GONE_LIMIT_S = 5.0  # what is promised: no process is left after that
_ONE_AFTER_THE_OTHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_ENDING, _GOING_ON = "ending", "going_on"
_LOOK_EVERY_S = 0.1
_OUTCOMES = {FAILED: "failed", WRONG: "refused", Preempted.EXIT_CODE: "preempted", None: "died"}


@dataclass
class Job:
    """One training job of a command.

    Attributes:
        command: the COMMAND that it was given by.
        exit_code: None until it has ended.
        seen: whether what it said went to the terminal of the command.
        told: what was said about its end, where it did not end well.
    """

    overrides: str
    command: str
    process: int
    host: str
    run_dir: str = ""
    metric: float | None = None
    exit_code: int | None = None
    seen: bool = True
    told: str = ""

    @classmethod
    def here(cls, overrides: str, command: str) -> Job:
        """A job that this process works on."""
        return cls(overrides, command, os.getpid(), os.uname().nodename, seen=SUBMITIT not in os.environ)


class Folder:
    """The notes of a sweep's jobs. ``sweep_dir``: Hydra's ``hydra.sweep.dir``."""

    def __init__(self, sweep_dir: str) -> None:
        self.sweep_dir = Path(sweep_dir).resolve()
        self._path = self.sweep_dir / ".jobs"

    def note(self, number: int, job: Job) -> None:
        """Write down how ``job`` stands."""
        self._path.mkdir(parents=True, exist_ok=True)
        unfinished = self._path / f".{number}.{os.getpid()}"
        unfinished.write_text(json.dumps(asdict(job)))
        unfinished.replace(self._path / f"{number}.json")

    def noted(self, number: int) -> Job | None:
        path = self._path / f"{number}.json"
        return Job(**json.loads(path.read_text())) if path.exists() else None

    def jobs(self) -> list[tuple[int, Job]]:
        """What is noted, by number."""
        numbers = sorted(int(path.stem) for path in self._path.glob("*.json"))
        return [(number, job) for number in numbers if (job := self.noted(number)) is not None]

    def alive(self) -> list[Job]:
        """The jobs that other processes of this host work on."""
        here = [job for job in self.jobs() if job[1].host == os.uname().nodename and job[1].process != os.getpid()]
        return [job for number, job in here if _is_held(self._path / f"{number}.lock")]

    @contextmanager
    def held(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock ``name``; yields whether it was got (always, if it waited)."""
        self._path.mkdir(parents=True, exist_ok=True)
        with (self._path / f"{name}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:  # held by another, or a network file system without locks
                yield False
            else:
                yield True

    def begin(self) -> None:
        """Called before the first job; a sweep that was told to end may be begun again, to go on."""
        (self._path / _GOING_ON).unlink(missing_ok=True)
        if self.is_ending():
            (self._path / _ENDING).replace(self._path / _GOING_ON)

    def end(self) -> None:
        """No further job is to start."""
        self._path.mkdir(parents=True, exist_ok=True)
        (self._path / _ENDING).touch()

    def is_ending(self) -> bool:
        """Whether no further job is to start."""
        return (self._path / _ENDING).exists()

    def how_to_go_on(self) -> str:
        """What to say to the person whose sweep was told to end."""
        return f"Run the same command with hydra.sweep.dir={shown(self.sweep_dir)}: what is done stays done."

    def goes_on(self) -> bool:
        """Whether the sweep was told to end before, and jobs that are done need not be run again."""
        return (self._path / _GOING_ON).exists()

    def die_with_sweep(self) -> None:
        """End this process when the command's own is gone, or wants it."""
        threading.Thread(target=self._die, name="safetrain-sweep", daemon=True).start()

    def _die(self) -> None:
        with self.held("sweep") as got:
            if got:
                os._exit(128 + signal.SIGINT)


_running: Folder | None = None


class Sweep(Callback):
    """Hydra calls it in the command's own process, before the first job of a sweep (hydra.callbacks in train.yaml)."""

    def on_multirun_start(self, config: Any, **_kwargs: Any) -> None:
        global _running
        _running = folder = Folder(str(config.hydra.sweep.dir))
        own = folder.held("sweep", wait=False)
        own.__enter__()
        folder.begin()
        if config.hydra.launcher._target_ != _ONE_AFTER_THE_OTHER:
            print(f"sweep: {config.hydra.sweep.dir}", flush=True)

        def end(number: int, _frame: FrameType | None) -> None:
            for again in handled:
                signal.signal(again, lambda number, _frame: os._exit(128 + number))
            if number == signal.SIGTERM and (jobs := folder.alive()):
                _end_saved(folder, jobs)
            folder.end()
            own.__exit__(None, None, None)
            _wait(folder, _GONE_LIMIT_S)
            in_queue = "SlurmLauncher" in config.hydra.launcher._target_
            left = "Slurm's jobs go on (squeue, scancel)" if in_queue else "no job of the sweep is left"
            _leave(128 + number, f"Interrupted; {left}.")

        handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, end)


def jobs_noted() -> list[Job]:
    """The jobs of the sweep that this process has begun."""
    return [] if _running is None else [job for _, job in _running.jobs() if job.command == COMMAND]


def best_found() -> str:
    """What a sweeper that searches has found; empty where there is none, or it does not say."""
    path = None if _running is None else _running.sweep_dir / "optimization_results.yaml"  # Optuna's, Ax's, Nevergrad's
    if path is None or not path.exists():
        return ""
    results: Any = OmegaConf.to_container(OmegaConf.load(path))
    if "best_value" not in results:  # several metrics at once
        return f"best: see {shown(path)}"
    return " ".join([f"best: {results['best_value']:.6g} ", *(f"{k}={v}" for k, v in results["best_params"].items())])


def wait_for_others() -> None:
    """Return when no job of the sweep runs any more in another process of this host."""
    if _running is not None:
        _wait(_running, float("inf"))


def table(jobs: Sequence[Job]) -> list[str]:
    """A line for each job: its overrides, its metric or how it ended, its directory."""
    width = max(len(job.overrides) for job in jobs)
    outcomes = [_outcome(job) for job in jobs]
    wide = max(len(outcome) for outcome in outcomes)
    rows = zip(jobs, outcomes, strict=True)
    return ["", *(f"{job.overrides:<{width}}  {outcome:<{wide}}  {job.run_dir}".rstrip() for job, outcome in rows)]


def _outcome(job: Job) -> str:
    if job.exit_code != OK:
        return _OUTCOMES.get(job.exit_code, "interrupted")
    return "ok" if job.metric is None else f"{job.metric:.6g}"


def _is_held(path: Path) -> bool:
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _end_saved(folder: Folder, jobs: Sequence[Job]) -> NoReturn:
    """SIGTERM: the jobs save and leave, as each would alone; none begins any more."""
    folder.end()
    for job in jobs:
        with suppress(ProcessLookupError):
            os.kill(job.process, signal.SIGTERM)
    _wait(folder, float("inf"))  # each job has a limit of its own
    _leave(Preempted.EXIT_CODE, f"The jobs of the sweep have saved what they had. {folder.how_to_go_on()}")


def _wait(folder: Folder, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while folder.alive() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)


def _leave(code: int, text: str) -> NoReturn:
    jobs = [replace(job, exit_code=code) if job.exit_code is None else job for job in jobs_noted()]
    lines = table(jobs) if jobs else []
    os.write(2, "\n".join(["", *lines, "", text, ""]).encode())  # print() may be where the signal came in
    os._exit(code)
