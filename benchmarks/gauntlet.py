"""The gauntlet: every kind of fault, in real launches of a tiny project; writes benchmarks/gauntlet.md.

    python benchmarks/gauntlet.py                    all of it, some minutes
    python benchmarks/gauntlet.py sigkill gil        these faults only, printed and not written

tests/faults/test_gauntlet.py runs the same cases and holds their words and times.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STALL_S = 3.0
_WATCHED = (f"watchdog.stall_s={STALL_S}", "watchdog.first_step_stall_s=30", "watchdog.poll_s=0.1")
_OVERALL_S = 150
_NOISE_S = 3.0  # what other work on the machine may add to what is promised

MODULE = """
import torch
import safetrain


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), index / 64)


class Mine(safetrain.Trainer):
    def training_step(self, batch):
        return self.model(batch).square().mean()

    def validation_step(self, batch):
        self.log("loss", self.model(batch).square().mean(dim=1))

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

    def on_epoch_start(self):
        with self.rank_zero("note", limit_s=2) as mine:
            self.noted = mine
"""
RECIPE = """# @package _global_
# A user's own recipe.
trainer: {_target_: mine.Mine}
data:
  train: {_target_: mine.Numbers}
  val: {_target_: mine.Numbers}
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1, momentum: 0.9}
loop: {epochs: 4}
loader: {batch_size: 4}
observers: {progress: null, tensorboard: null}
device: cpu
"""


@dataclass(frozen=True)
class Case:
    """One fault in one launch, and what is promised of it: an end within ``limit_s``, these ``words`` in the story."""

    fault: str
    at: str = "training_step"
    rank: int = 1
    ranks: int = 2
    launcher: str = "local"
    limit_s: float = 5.0
    words: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    goes_on: bool = False

    def __str__(self) -> str:
        workers = "_worker" if any(argument.startswith("loader.num_workers") for argument in self.job) else ""
        return f"{self.fault}-{self.at}{workers}-rank{self.rank}of{self.ranks}-{self.launcher}"


def stuck(fault: str, *, limit_s: float = STALL_S + 3, **more: Any) -> Case:
    """A fault that the watchdog has to find."""
    return Case(fault, **{**more, "job": (*_WATCHED, *more.get("job", ())), "limit_s": limit_s})


_WORKER = ("loader.num_workers=1",)
_INJECTED = ("RuntimeError: injected by safetrain.chaos",)
CASES = (
    # exceptions: the rank, its line, the words
    Case("raise", words=(*_INJECTED, "mine.py:16", "in training_step")),
    Case("raise", rank=3, ranks=4, launcher="torchrun", words=(*_INJECTED, "mine.py:16")),
    Case("raise", "validation_step", rank=0, words=(*_INJECTED, "mine.py:19", "in validation_step")),
    Case("raise", "dataset", words=(*_INJECTED, "mine.py:11")),
    Case("raise", "dataset", rank=0, launcher="torchrun", job=_WORKER, words=(*_INJECTED, "mine.py:11")),
    Case("raise", "collate", rank=0, words=_INJECTED),
    Case("raise", "backward", words=_INJECTED),
    Case("raise", "optimizer", rank=3, ranks=4, words=_INJECTED),
    Case("raise", "build_model", rank=0, launcher="torchrun", words=(*_INJECTED, "mine.py:22")),
    Case("disk_full", "rank_zero", rank=0, ranks=4, words=("No space left on device", "rank_zero('note')")),
    Case("disk_full", "validation_step", words=("No space left on device", "df -h")),
    Case("out_of_memory", goes_on=True, limit_s=60),
    Case("slow", rank=0, goes_on=True, limit_s=60, job=_WATCHED),
    # ends without a word: the rank, signal or code, and what it usually means
    Case("sigkill", words=("killed by SIGKILL", "ran out of memory", "When last seen, up to 0.3 s before, it was in ")),
    Case("sigkill", rank=0, ranks=4, launcher="torchrun", words=("(SIGKILL)",)),
    Case("sigterm", rank=0, words=("Preempted: rank 0 got SIGTERM; all ranks stopped together", "resume=auto")),
    Case("sigterm", rank=3, ranks=4, launcher="torchrun", words=("Preempted: rank 3 got SIGTERM", "resume=auto")),
    Case("sigsegv", rank=0, words=("ended by SIGSEGV", "native code", "mine.py")),
    Case("exit", words=("left with exit code 3", "os._exit(3)")),
    Case("exit", rank=0, launcher="torchrun", words=("exitcode  : 3",)),
    Case("exit_0", rank=0, words=("left with exit code 0 before the others",)),
    Case("abort", rank=3, ranks=4, words=("ended by SIGABRT", "C++ code gave up")),
    # loaders, and what a machine runs out of
    Case("sigkill", "dataset", job=_WORKER, words=("DataLoader worker", "loader.num_workers", "ran out")),
    Case("sigbus", "dataset", rank=0, launcher="torchrun", job=_WORKER, words=("/dev/shm", "--shm-size")),
    Case("exit", "dataset", rank=0, job=_WORKER, words=("loader process ended", "os._exit")),
    Case("too_many_files", rank=0, words=("Too many open files", "ulimit -n")),
    # the launcher itself
    Case("sigint", "launcher", job=_WORKER, words=("Interrupted by SIGINT; no rank is left",)),
    Case("sigterm", "launcher", ranks=4, words=("Preempted: ranks 0-3 got SIGTERM", "resume=auto")),
    Case("sigterm", "launcher", launcher="torchrun", job=_WORKER, words=("Preempted: ranks 0 and 1 got SIGTERM",)),
    Case("sigkill", "launcher", limit_s=10, job=_WORKER),
    Case("sigkill", "launcher", launcher="torchrun", limit_s=10, job=_WORKER),
    # stands still: the rank, its line or its state
    stuck("stuck", words=("mine.py:16", "stalled")),
    stuck("stuck", rank=3, ranks=4, launcher="torchrun", words=("mine.py:16", "stalled")),
    stuck("stuck", at="dataset", rank=0, words=("mine.py:11",)),
    stuck("stuck", at="dataset", job=_WORKER, words=("mine.py:11", "loader")),
    stuck("lock", at="dataset", rank=0, job=_WORKER, words=("mine.py:11", "loader")),  # H70
    stuck("lock", rank=0, launcher="torchrun", words=("mine.py:16",)),
    stuck("stuck", at="rank_zero", rank=0, words=("stuck in rank_zero('note')", "mine.py:25", "limit_s")),
    stuck("gil", words=("holding the interpreter", "mine.py:16")),
    stuck("sigstop", rank=0, ranks=4, words=("stopped",)),
    # collectives that don't match
    stuck("stray_collective", rank=0, words=("all_reduce", "mine.py:16")),
    stuck("absent_from_barrier", ranks=4, rank=3, words=("mine.py:16",)),
    stuck("other_dtype", words=("int32", "float32", "mine.py:16")),
    stuck("other_op", launcher="torchrun", words=("MAX", "SUM", "mine.py:16")),
    stuck("swapped_order", rank=3, ranks=4, words=("MAX", "SUM", "mine.py:16")),
    # replicas that drift apart
    Case("drift_parameter", rank=3, ranks=4, job=("audit.every_steps=2",), words=("0.weight",)),
    Case("drift_optimizer", rank=0, ranks=4, launcher="torchrun", job=("audit.every_steps=2",), words=("momentum",)),
)


def write_project(folder: Path) -> None:
    """The user's project that all cases run on."""
    (folder / "recipe").mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(MODULE)
    (folder / "recipe" / "mine.yaml").write_text(RECIPE)


def run(case: Case, folder: Path) -> dict[str, Any]:
    """What ``safetrain.chaos`` reports on a case in a project at ``folder``, and all that was ``said``."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    ours = {"fault": case.fault, "at": case.at, "rank": case.rank, "ranks": case.ranks, "launcher": case.launcher}
    arguments = [f"{key}={value}" for key, value in ours.items()]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "safetrain.chaos",
            "recipe=mine",
            *arguments,
            f"report={report}",
            "limit_s=40",
            *case.job,
        ],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_OVERALL_S,
        check=False,
    )
    if not report.exists():
        raise RuntimeError(f"chaos made no report:\n{done.stdout}\n{done.stderr}")
    return {**json.loads(report.read_text()), "said": done.stdout + done.stderr}


def shortcomings(case: Case, outcome: dict[str, Any]) -> list[str]:
    """What was promised of the case, and is not so."""
    said, seconds = outcome["said"], outcome["seconds"]
    if case.goes_on:
        return [] if (outcome["end"], outcome["exit_code"]) == ("went on", 0) else [f"{outcome['end']}\n{said}"]
    checks = {
        f"it {outcome['end']}": outcome["end"] == "ended",
        "its exit code is 0": outcome["exit_code"] != 0,
        "the culprit is not named": outcome["named"],
        f"it took {seconds:.1f} s, and {case.limit_s:g} are promised": seconds <= case.limit_s + _NOISE_S,
        "a victim's error is told as the cause": "closed by peer" not in outcome["sentence"],  # H35
        **{f"{word!r} is not said": word in said for word in case.words},
    }
    return [complaint for complaint, is_well in checks.items() if not is_well]


def table(rows: list[dict[str, Any]]) -> str:
    """The page: one line a case."""
    import torch

    lines = [
        "# The gauntlet",
        "",
        "Made by `python benchmarks/gauntlet.py`: each fault in a real launch of a tiny project, seconds counted from",
        f"the fault to the end of the last process; the stall limit is {STALL_S:g} s. torch {torch.__version__}, Gloo,",
        f"Python {platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "| fault | at | rank | launcher | outcome | seconds | culprit named |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        where = f"{row['rank']} of {row['ranks']}" if row["at"] != "launcher" else "-"
        named = "-" if row["end"] == "went on" else "yes" if row["named"] else "**no**"
        seconds = "-" if row["end"] == "went on" else f"{row['seconds']:.1f}"
        lines.append(
            f"| {row['fault']} | {row['at']} | {where} | {row['launcher']} | {row['end']} | {seconds} | {named} |"
        )
    return "\n".join(lines) + "\n"


def main(only: list[str]) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_project(Path(folder))
        for case in CASES:
            if not only or case.fault in only:
                rows.append(run(case, Path(folder)))
                print(table(rows).splitlines()[-1], *shortcomings(case, rows[-1]), sep="\n    ", flush=True)
    if not only:
        Path(__file__).with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
