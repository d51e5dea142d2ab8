"""A run that is killed again and again, at random instants, and resumed each time, ends as one that was left alone.

    python -m benchmarks.kill_and_resume                        50 kills, about 10 minutes
    python -m benchmarks.kill_and_resume --kills 200 --seed 3

SIGKILL goes to the launcher, to one rank, or to all of them, in any phase: start-up, steps, validation, saves. In the
end every tensor and number of the last checkpoint (weights, optimizer, generators, position in the data) and every
event is compared with those of the run that was not killed, for equality of bits. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from safetrain.checkpoint import find, read

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
        loss = self.model(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("loss", self.model(batch).square().mean(dim=1))

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
loop: {epochs: 100, accumulate: 2, log_every_steps: 20}
loader: {batch_size: 4, num_workers: 1}
checkpoint: {every_steps: 10}
observers: {progress: null, tensorboard: null}
launch: {nproc_per_node: 2}
device: cpu
"""
LONGEST_LIFE_S = 9.0  # of an attempt; its start takes about half of that


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "safetrain", "recipe=mine", *more],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


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
    """What a run told, but for the times."""
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    for event in told:
        event.pop("time")
        event.get("metrics", {}).pop("train/samples_per_s", None)
    return [event for event in told if event["kind"] != "start"]


def differences(a: Any, b: Any, where: str) -> list[str]:
    """The places in nested states at which not every bit is the same."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [found for n, pair in enumerate(zip(a, b, strict=True)) for found in differences(*pair, f"{where}.{n}")]
    same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or a != a
    return [] if same else [where]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the victims")
    options = parser.parse_args()
    chance, killed = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe").mkdir()
        (folder / "mine.py").write_text(MODULE)
        (folder / "recipe" / "mine.yaml").write_text(RECIPE)
        whole = folder / "whole"
        assert start(folder, f"hydra.run.dir={whole}").wait() == 0
        expected = read(*find(whole))
        run_dir = folder / "cut"
        steps: list[int] = []
        while killed.total() < options.kills:
            resume = ["resume=auto"] if (run_dir / "checkpoints").exists() else []
            process = start(folder, f"hydra.run.dir={run_dir}", *resume)
            try:
                process.wait(chance.uniform(0, LONGEST_LIFE_S))
            except subprocess.TimeoutExpired:
                killed[kill(process, chance)] += 1
                steps.append(read(*find(run_dir)).step if (run_dir / "checkpoints" / "latest").exists() else 0)
                print(f"kill {killed.total()}: step {steps[-1]} of {expected.step}", end="\r", flush=True)
            else:
                break
        assert start(folder, f"hydra.run.dir={run_dir}", "resume=auto").wait() == 0
        found = read(*find(run_dir))
        wrong = differences(found.shared, expected.shared, "shared") + differences(found.own, expected.own, "own")
        wrong += ["events"] if events(run_dir) != events(whole) else []
    print(f"{killed.total()} kills ({dict(killed)}), the last at step {steps[-1]} of {expected.step}")
    print("equal to the run that was left alone, bit for bit" if not wrong else f"DIFFERENT: {', '.join(wrong[:20])}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
