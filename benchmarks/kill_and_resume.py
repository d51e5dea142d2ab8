"""A run that is killed again and again, at random instants, and resumed each time, ends as one that was left alone.

    python -m benchmarks.kill_and_resume                        50 kills
    python -m benchmarks.kill_and_resume --kills 200 --seed 3 --minutes 60

The page goes to benchmarks/results. SIGKILL goes to the launcher, to one rank, or to all of them, in any phase:
start-up, steps, validation, saves. In the end every tensor and number of the last checkpoint (weights, optimizer,
generators, position in the data) and every event is compared with those of the run that was not killed, for equality of
bits. Exit code 1 where anything differs. tests/faults does the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import operator
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import cpu_model
from safetrain.checkpoint import find, read
from safetrain.observer import OF_THE_MACHINE
from safetrain.testing import differences

MODULE = """
import time
import torch
import safetrain


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((4,), index / self.count) + 0.1 * torch.randn(4)


class Mine(safetrain.Trainer):
    def training_step(self, batch):
        time.sleep(0.002)
        loss = (self.model(batch) - batch[:, :2].sin()).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("loss", (self.model(batch) - batch[:, :2].sin()).square().mean(dim=1))

    def build_model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(4, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2)
        )
"""
RECIPE = """# @package _global_
# A run to be killed.
trainer: {_target_: mine.Mine}
data:
  train: {_target_: mine.Numbers, count: 512}
  val: {_target_: mine.Numbers, count: 64}
optimizer: {_target_: torch.optim.AdamW, _partial_: true, lr: 0.01}
scheduler: {_target_: torch.optim.lr_scheduler.OneCycleLR, _partial_: true, max_lr: 0.01}
loop: {epochs: 50, accumulate: 2, log_every_steps: 20}
loader: {batch_size: 4, num_workers: 1}
checkpoint: {every_steps: 10}
observers: {progress: null, tensorboard: null}
launch: {nproc_per_node: 2}
device: cpu
"""
IN_START = 0.25  # of the kills: at any instant of an attempt's start; the others soon after its first checkpoint
SOON_S = 0.4


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "safetrain", "recipe=mine", *more],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def newest(checkpoints: Path) -> str:
    """The name of the newest checkpoint; empty where there is none."""
    latest = checkpoints / "latest"
    return latest.readlink().name if latest.is_symlink() else ""


def ends_before(process: subprocess.Popen[bytes], instant: Callable[[], bool]) -> bool:
    """Whether the job is over before ``instant`` comes."""
    while not instant():
        if process.poll() is not None:
            return True
        time.sleep(0.01)
    return False


def kill(process: subprocess.Popen[bytes], chance: random.Random) -> str:
    """Kill a part of a job; which one. Returns when nothing of the job is left."""
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    whom = chance.choice(["launcher", "rank", "all"] if ranks else ["launcher"])
    if whom == "all":
        os.killpg(process.pid, signal.SIGKILL)
    for pid in ranks if whom == "all" else [chance.choice(ranks)] if whom == "rank" else [process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            whom = "nobody"  # it ended just now
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        time.sleep(0.01)
    return whom


def events(run_dir: Path) -> list[dict[str, Any]]:
    """What a run told, but for times and memory."""
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    for event in told:
        event.pop("time")
        metrics = event.get("metrics", {})
        for name in [name for name in metrics if name.startswith(("train/samples_per_s", "time/", "memory/"))]:
            del metrics[name]
    return [event for event in told if event["kind"] not in ("start", *OF_THE_MACHINE)]


@dataclass(frozen=True)
class Report:
    """How it went.

    Attributes:
        killed: how often whom.
        saving: how often while a checkpoint was being written.
        steps: of the newest checkpoint, after each kill.
        wrong: where the run differs from the one that was left alone.
    """

    killed: Counter[str]
    saving: int
    steps: list[int]
    total_steps: int
    seconds: float
    wrong: list[str]


def kill_and_resume(folder: Path, kills: int, seed: int, limit_s: float = math.inf) -> Report:
    """Run once in peace, and once with ``kills`` kills, or as many as there is time for; work in ``folder``."""
    chance, killed, began = random.Random(seed), Counter[str](), time.monotonic()
    (folder / "recipe").mkdir()
    (folder / "mine.py").write_text(MODULE)
    (folder / "recipe" / "mine.yaml").write_text(RECIPE)
    whole, run_dir = folder / "whole", folder / "cut"
    checkpoints = run_dir / "checkpoints"
    long = f"loop.epochs={max(20, kills // 2)}"
    process = start(folder, long, f"hydra.run.dir={whole}")
    assert not ends_before(process, lambda: newest(whole / "checkpoints") != "")
    start_s = time.monotonic() - began
    assert process.wait() == 0
    expected = read(*find(whole))
    steps: list[int] = []
    saving = 0
    while killed.total() < kills and time.monotonic() - began < limit_s:
        process = start(folder, long, f"hydra.run.dir={run_dir}", *(["resume=auto"] if steps else []))
        before, started = newest(checkpoints), time.monotonic()
        in_start = chance.random() < IN_START
        after_s = chance.uniform(0, start_s if in_start else SOON_S)
        if not in_start:
            if ends_before(process, lambda before=before: newest(checkpoints) != before):
                break
            start_s, started = time.monotonic() - started, time.monotonic()
        if ends_before(process, lambda until=started + after_s: time.monotonic() > until):
            break
        killed[kill(process, chance)] += 1
        saving += any(checkpoints.glob(".writing_*"))
        steps.append(int(newest(checkpoints).split("_")[1]) if newest(checkpoints) else 0)
        print(f"kill {killed.total()}: step {steps[-1]} of {expected.step}", end="\r", flush=True)
    assert start(folder, long, f"hydra.run.dir={run_dir}", "resume=auto").wait() == 0
    found = read(*find(run_dir))
    wrong = [*differences(found.shared, expected.shared, "shared"), *differences(found.own, expected.own, "own")]
    wrong += ["events"] if events(run_dir) != events(whole) else []
    return Report(killed, saving, steps, expected.step, time.monotonic() - began, wrong)


def page(report: Report) -> str:
    versions = f"safetrain {version('safetrain')}, torch {torch.__version__}, Python {platform.python_version()}"
    per_kill = report.seconds / max(1, report.killed.total())
    result = "None: equal to the run that was left alone, bit for bit." if not report.wrong else ", ".join(report.wrong)
    return f"""# Killed at random instants and resumed, {datetime.date.today().isoformat()}

{versions}, {cpu_model()}. 2 ranks, one loader process each, a checkpoint every 10 steps.
{report.total_steps} steps in all; {report.seconds:.0f} s, {per_kill:.1f} s for a kill and what was lost by it.
Processes that wanted a core, in the last 15 minutes: {os.getloadavg()[2]:.1f}.

| | |
|---|---|
| kills (SIGKILL) | {report.killed.total()} |
| of these, whom | {", ".join(f"{whom} {count}" for whom, count in sorted(report.killed.items()))} |
| of these, while a checkpoint was being written | {report.saving} |
| kills after which the run had come further | {sum(map(operator.lt, [0, *report.steps], report.steps))} |
| step of the newest checkpoint after the last kill | {report.steps[-1] if report.steps else 0} |
| differences in the end (weights, optimizer, generators, place in the data, events) | {result} |
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the victims")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where the page goes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="make no more kills after that")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report = kill_and_resume(Path(name), options.kills, options.seed, 60 * options.minutes)
    text = page(report)
    print(text)
    file = options.results / f"kill_and_resume_{datetime.datetime.now():%Y-%m-%d_%H%M}.md"
    file.write_text(text, encoding="utf-8")
    print(f"written to {file}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
