"""Break a run on purpose, and see how it ends: any recipe, any fault, a real launch.

    python -m safetrain.chaos recipe=NAME fault=sigkill rank=1 step=5
    python -m safetrain.chaos recipe=NAME fault=raise at=dataset rank=-1 launcher=torchrun ranks=4 loader.num_workers=2
    python -m safetrain.chaos recipe=NAME fault=sigterm at=launcher

    fault      what happens (required); without arguments all faults and places are listed
    at         where: a method of the Trainer, rank_zero (a section), dataset, collate, backward, optimizer or launcher
               (training_step)
    rank       the culprit (1); negative numbers count from the last
    step       from which step on (2)
    ranks      how many (2)
    launcher   local or torchrun (local)
    limit_s    seconds from the fault until everything is ended by hand (60)
    report     a file for the outcome as JSON

All other arguments are the job's own; it writes below outputs/chaos, where no run goes on, unless hydra.run.dir is
given. What the job prints is passed on; the outcome is one line at the end. Exit codes: 0 the job went on, or ended by
itself with nothing left behind and the culprit named; 1 it did not; 2 wrong argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from safetrain.checks import nearest
from safetrain.errors import ConfigError
from safetrain.faults import FAULTS
from safetrain.injection import LAUNCHER, PLACES, Fault

_LAUNCHERS = ("local", "torchrun")
_RUN_DIR = "hydra.run.dir="
_APART = '"${run_dir:outputs/chaos/${name}}"'  # never a run's own directory, whatever `resume` says
_KEYS = ("fault", "at", "rank", "step", "ranks", "launcher", "limit_s", "report")
_START_LIMIT_S = 300  # until the fault strikes: imports, the first steps
_POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36
# the process says nothing, or can open no file to say it in; or it was found later, at another line
_LEAVE_NO_LINE = ("sig", "exit", "abort", "too_many_files", "drift")


@dataclass(frozen=True)
class Outcome:
    """What became of a job after a fault.

    Attributes:
        end: ``ended`` by itself, ``went on`` to its own end, ``hung`` until it was ended by hand, ``not reached``.
        seconds: from the fault to the end of the last process, the launcher's and the loaders' included.
        named: whether the story names the culprit: its rank and, for a fault in user code, the line.
        sentence: the story's first line.
    """

    fault: str
    at: str
    rank: int
    ranks: int
    step: int
    launcher: str
    end: str
    exit_code: int
    seconds: float
    named: bool
    sentence: str
    place: str

    @property
    def good(self) -> bool:
        """It went on, or ended by itself and said why."""
        return self.end == "went on" or (self.end == "ended" and self.named)

    def __str__(self) -> str:
        where = self.at if self.at == LAUNCHER else f"{self.at} of rank {self.rank}"
        job = f"{self.fault} at {where}, step {self.step}, {self.ranks} ranks, {self.launcher}"
        named = "named" if self.named else "NOT named"
        return f"{job}: {self.end} after {self.seconds:.1f} s, exit code {self.exit_code}, {named}"


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, _choices(), sep="\n")
        return 0
    try:
        options, job = _split(arguments)
        fault, ranks, launcher, limit_s = _parse(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    outcome = strike(fault, ranks, launcher, job, limit_s)
    print(outcome, flush=True)
    if "report" in options:
        Path(options["report"]).write_text(json.dumps(asdict(outcome), indent=1))
    return 0 if outcome.good else 1


def strike(fault: Fault, ranks: int, launcher: str, job: Sequence[str], limit_s: float) -> Outcome:
    """Run the job with ``fault`` in it until its last process has ended, which is after ``limit_s`` at the latest.

    This process adopts whatever the job leaves behind: it must have no other children.
    """
    _adopt_orphans()
    if fault.at == LAUNCHER and (number := signal.Signals[fault.what.upper()]) != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores it, and so would what it starts
    with tempfile.TemporaryDirectory(prefix="safetrain_chaos_") as folder:
        note = Path(folder, "note")
        armed = Fault(fault.what, fault.at, fault.rank, fault.step, str(note))
        with subprocess.Popen(
            _command(launcher, ranks, _apart(job)),
            env=os.environ | armed.to_environment(),
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            assert process.stderr is not None
            said = bytearray()
            reader = threading.Thread(target=_pass_on, args=(process.stderr, said), daemon=True)
            reader.start()
            begin = time.monotonic()
            struck = _await_end(process, note, fault, limit_s)
            end = time.monotonic()
            by_hand = _end_all(process)
            reader.join(timeout=1)
        facts = {"monotonic_s": begin, "place": "", "run_dir": ""} | (json.loads(note.read_text()) if struck else {})
    story = _story(facts["run_dir"], said.decode(errors="replace"))
    culprit = fault.rank % ranks
    return Outcome(
        fault=fault.what,
        at=fault.at,
        rank=culprit,
        ranks=ranks,
        step=fault.step,
        launcher=launcher,
        end=_end(process.returncode, struck=struck, by_hand=by_hand),
        exit_code=process.returncode,
        seconds=round(end - facts["monotonic_s"], 2),
        named=_names(story, fault, culprit, facts["place"]),
        sentence=story.strip().partition("\n")[0],
        place=facts["place"],
    )


def _end(exit_code: int, *, struck: bool, by_hand: bool) -> str:
    if by_hand:
        return "hung"
    if not struck:
        return "not reached"
    return "went on" if exit_code == 0 else "ended"


def _await_end(process: subprocess.Popen[bytes], note: Path, fault: Fault, limit_s: float) -> bool:
    """Return when no process is left or the time is up: whether the fault struck."""
    deadline, struck = time.monotonic() + _START_LIMIT_S, False
    while time.monotonic() < deadline and not _all_gone(process):
        if not struck and note.exists():
            struck, deadline = True, time.monotonic() + limit_s
            if fault.at == LAUNCHER:
                process.send_signal(signal.Signals[fault.what.upper()])
        time.sleep(_POLL_S)
    return struck or note.exists()


def _all_gone(process: subprocess.Popen[bytes]) -> bool:
    """Whether the launcher and everything below it has ended; reaps what was left to this process."""
    if process.poll() is None:
        return False
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return True
    return False


def _end_all(process: subprocess.Popen[bytes]) -> bool:
    """Kill what is left; whether anything was."""
    by_hand = False
    while not _all_gone(process):
        by_hand = True
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return by_hand


def _descendants(pid: int) -> list[int]:
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended just now
            for child in map(int, file.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends: so none can end unseen."""
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise ConfigError("safetrain.chaos counts the processes a job leaves behind, and needs Linux for that")


def _command(launcher: str, ranks: int, job: Sequence[str]) -> list[str]:
    if launcher == "local":
        return [sys.executable, "-m", "safetrain", *job, f"launch.nproc_per_node={ranks}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *torchrun, "-m", "safetrain", *job]


def _apart(job: Sequence[str]) -> list[str]:
    """The job in a directory that no run goes on from."""
    return [*job] if any(argument.startswith(_RUN_DIR) for argument in job) else [*job, f"{_RUN_DIR}{_APART}"]


def _pass_on(stream: IO[bytes], said: bytearray) -> None:
    for line in stream:
        said += line
        sys.stderr.buffer.write(line)
        sys.stderr.flush()


def _story(run_dir: str, said: str) -> str:
    """The verdict where there is one, else all that was said."""
    verdict = Path(run_dir, "failure.txt")
    return verdict.read_text() if run_dir and verdict.exists() else said


def _names(story: str, fault: Fault, culprit: int, place: str) -> bool:
    """The rank in the first sentence and, where the fault was in user code that can be pointed at, its line.

    Of a rank that leaves without a word torchrun's report is enough: it may end the others before they can speak.
    """
    if fault.at == LAUNCHER:
        return fault.what.upper() in story or fault.what == "sigkill"  # nobody is left to say anything
    no_line = fault.what.startswith(_LEAVE_NO_LINE) or not place
    by_torchrun = re.search(r"Root Cause \(first.*?rank +: (\d+)", story, re.DOTALL)
    if by_torchrun is not None and no_line:
        return int(by_torchrun[1]) == culprit
    told = re.search(rf"\brank {culprit}\b", story.strip().partition("\n\n")[0], re.IGNORECASE)
    return told is not None and (no_line or place in story)


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Our own arguments by name, and the job's."""
    ours: dict[str, str] = {}
    job = []
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError("a trial is of one job: leave out -m, and give each value of a sweep by itself")
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key == "launch.nproc_per_node":
            raise ConfigError(f"{argument}: here it is ranks={value}, whichever launcher starts them")
        if equals and key in _KEYS:
            ours[key] = value
        else:
            job.append(argument)
    return ours, job


def _choices() -> str:
    """What there is to say for ``fault`` and ``at``."""
    names = {"fault=": FAULTS, "at=": PLACES}
    return "\n\n".join("\n".join(f"    {key}{name}" for name in named) for key, named in names.items())


def _parse(options: dict[str, str]) -> tuple[Fault, int, str, float]:
    if "fault" not in options:
        raise ConfigError("fault is missing. `python -m safetrain.chaos` lists what it may be.")
    launcher = options.get("launcher", "local")
    if launcher not in _LAUNCHERS:
        allowed = ", ".join(_LAUNCHERS)
        raise ConfigError(f"launcher={launcher}: no such choice.{nearest(launcher, _LAUNCHERS)} Allowed: {allowed}.")
    ranks = _number(options, "ranks", 2)
    rank = _number(options, "rank", 1)
    if not -ranks <= rank < ranks:
        raise ConfigError(f"rank={rank}: there are {ranks} ranks. Allowed: {-ranks} to {ranks - 1}.")
    fault = Fault(options["fault"], options.get("at", "training_step"), rank, _number(options, "step", 2))
    return fault, ranks, launcher, _number(options, "limit_s", 60)


def _number(options: dict[str, str], key: str, default: int) -> int:
    try:
        return int(options.get(key, default))
    except ValueError as error:
        raise ConfigError(f"{key}={options[key]}: must be a whole number") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
