"""How long a save holds the loop: synchronous, asynchronous, and the copy in memory that it can't do without.

    python -m benchmarks.checkpoint_hold                 # a state of 200 MB, 2 ranks; about 3 minutes on 2 idle cores
    python -m benchmarks.checkpoint_hold --megabytes 50 --rounds 5

Both ways are measured in the same two ranks (forked, Gloo, one thread each), in turns. What disturbs the machine
disturbs both, so ratios are taken round by round. A round is: the bare copy, a few steps; an asynchronous save, as many
steps beside its writing; a synchronous save.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from benchmarks.table import cpu_model, interval_of_median, quartiles
from safetrain.checkpoint import Checkpoints
from safetrain.comm import Comm
from safetrain.config import Checkpoint
from safetrain.snapshot import Snapshot
from safetrain.testing import run_ranks
from safetrain.tree import split

RANKS = 2
STEPS = 5
COPIES_OF_A_PARAMETER = 3  # itself, and Adam's two
BYTES_OF_A_PARAMETER = 4


@dataclass
class Times:
    """Seconds that the loop's thread was held, one entry a round, and how much of it the thread computed: CPU time is
    steadier where others use the machine."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def measure(self, work: Callable[[], None], times: int = 1) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(times):
            work()
        self.cpu_s.append((time.thread_time() - cpu) / times)
        self.wall_s.append((time.perf_counter() - wall) / times)


@dataclass
class Holds:
    """Of one rank."""

    copy: Times = field(default_factory=Times)
    asynchronous: Times = field(default_factory=Times)
    synchronous: Times = field(default_factory=Times)
    step_beside: Times = field(default_factory=Times)
    step_alone: Times = field(default_factory=Times)
    first: Times = field(default_factory=Times)
    state_bytes: int = 0


class Training:
    """Something to train whose state has about ``megabytes``: equal square layers."""

    def __init__(self, megabytes: float, layers: int = 16) -> None:
        parameters = megabytes * 1e6 / BYTES_OF_A_PARAMETER / COPIES_OF_A_PARAMETER
        width = round((parameters / layers) ** 0.5)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.batch = torch.randn(32, width)
        self.steps_done = 0
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.steps_done += 1

    def snapshot(self) -> Snapshot:
        shared = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return Snapshot(self.steps_done, 0, shared, {"rng": torch.get_rng_state()}, "")


def run_rank(comm: Comm, folder: Path, megabytes: float, rounds: int) -> Holds:
    """One rank's times. Before the first round everything has been done once: memory is found."""
    training, holds = Training(megabytes), Holds()
    asynchronous = Checkpoints(folder / "asynchronous", comm, Checkpoint(keep_last=1))
    synchronous = Checkpoints(folder / "synchronous", comm, Checkpoint(keep_last=1, asynchronous=False))
    _, tensors = split(training.snapshot().shared)
    holds.state_bytes = sum(tensor.nbytes for tensor in tensors.values())
    buffers = [torch.zeros_like(tensor) for tensor in tensors.values()]

    def copy() -> None:
        for buffer, tensor in zip(buffers, tensors.values(), strict=True):
            buffer.copy_(tensor)

    def save(checkpoints: Checkpoints) -> Callable[[], None]:
        return lambda: checkpoints.save(training.snapshot())

    holds.first.measure(save(asynchronous))
    asynchronous.finish()
    for _ in range(rounds):
        comm.barrier("copy")
        if comm.rank == 0:
            holds.copy.measure(copy)
        holds.step_alone.measure(training.step, STEPS)
        comm.barrier("asynchronous")
        holds.asynchronous.measure(save(asynchronous))
        holds.step_beside.measure(training.step, STEPS)
        asynchronous.finish()
        comm.barrier("synchronous")
        holds.synchronous.measure(save(synchronous))
    saved = asynchronous.load("auto")
    assert saved is not None
    if comm.rank == 0 and saved.step != training.steps_done - STEPS:
        raise AssertionError(f"step {saved.step} was read back, of {training.steps_done} done: not what was saved last")
    return holds


def milliseconds(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle, low, high = (1e3 * value for value in quartiles(values))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def ratio(values: Sequence[float], to: Sequence[float]) -> str:
    ratios = [value / other for value, other in zip(values, to, strict=True)]
    low, high = interval_of_median(ratios)
    return f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"


def page(ranks: Sequence[Holds], rounds: int) -> str:
    first, other = ranks
    versions = f"safetrain {version('safetrain')}, torch {torch.__version__}, Python {platform.python_version()}"
    lines = [
        f"# How long a save holds the loop, {datetime.date.today().isoformat()}",
        "",
        f"{versions}, {cpu_model()}. {RANKS} ranks, one thread each; {rounds} rounds.",
        f"Processes that wanted a core, in the last 15 minutes: {os.getloadavg()[2]:.1f} (the two ranks are 2).",
        f"State: {first.state_bytes / 1e6:.0f} MB, which rank 0 copies and writes. Milliseconds of the loop's thread:",
        "median (quartiles) over rounds. Ratios are paired by round: median [95 % interval of the median].",
        "",
        "| | rank 0 wall ms | rank 0 CPU ms | rank 1 wall ms | wall to the copy | CPU to the copy |",
        "|---|---|---|---|---|---|",
    ]
    for title, name in {
        "the copy alone (rank 0's)": "copy",
        "asynchronous save": "asynchronous",
        "synchronous save": "synchronous",
        "the first asynchronous save (new memory)": "first",
        "a step beside the writing": "step_beside",
        "a step without": "step_alone",
    }.items():
        mine, theirs = getattr(first, name), getattr(other, name)
        cells = [title, milliseconds(mine.wall_s), milliseconds(mine.cpu_s), milliseconds(theirs.wall_s)]
        saves = name in ("asynchronous", "synchronous")
        cells += [ratio(mine.wall_s, first.copy.wall_s), ratio(mine.cpu_s, first.copy.cpu_s)] if saves else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=200, help="size of the state")
    parser.add_argument("--rounds", type=int, default=20, help="saves of each kind")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to write to; default: the temporary one")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where the page goes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="safetrain_hold_") as folder:
        limit_s = 60 + options.rounds * max(10, options.megabytes / 5)
        ranks = run_ranks(run_rank, RANKS, Path(folder), options.megabytes, options.rounds, timeout_s=limit_s)
    text = page(ranks, options.rounds)
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"checkpoint_hold_{datetime.datetime.now():%Y-%m-%d_%H%M}.md"
    file.write_text(text, encoding="utf-8")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
