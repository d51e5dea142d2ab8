"""How safetrain's own costs grow with the number of ranks, where nothing is computed.

    python -m benchmarks.growth                    # 2 to 32 ranks on this machine, about 5 minutes
    python -m benchmarks.growth 2 4 --rounds 3

There are more ranks than cores, so wall time says nothing, and CPU time of a rank is what is given. Segments are those
that TCP sent on this machine meanwhile, by its own counter (/proc/net/snmp), with acknowledgements; a quiet machine
sends a few a second by itself.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import safetrain
from benchmarks.table import cpu_model
from safetrain import checkup
from safetrain.audit import ReplicaAudit
from safetrain.board import Board
from safetrain.comm import Comm
from safetrain.memory import Reading
from safetrain.precision import FP32
from safetrain.testing import run_ranks
from safetrain.timing import OWN_WORK, PARTS
from safetrain.watchdog import _LOOKS_PER_S, watch

WORDS = 24  # of a vote on the control group
WIDTH = 32  # of the model: gradients enough that each rank has some to reduce, as in any real one
CALLS = 100
WATCHED_S = 5.0
NOTED = len([*OWN_WORK, *Reading._fields, *set(PARTS.values())])  # of each rank, by timing.py and memory.py
HOP_S = 20e-6  # a small message from host to host in a data centre; on this machine, through the kernel, 30 to 50


@dataclass
class Grown:
    """What one rank measured; seconds of CPU, but for ``looks``."""

    cpu_s: dict[str, float] = field(default_factory=dict)
    segments: dict[str, float] = field(default_factory=dict)
    looks_per_s: float = 0.0


def run_rank(comm: Comm) -> Grown:
    found = Grown()
    words = torch.ones(WORDS, dtype=torch.float64)
    with _measured(comm, found, "a vote of its own", CALLS):
        for _ in range(CALLS):
            comm.start_sum(words.clone()).wait()
    _bare_step(comm, found)
    _our_step(comm, found)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    audit = ReplicaAudit(model, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, FP32(), comm, 1)
    with _measured(comm, found, "an audit", 10):
        for step in range(10):
            audit.run(step)
    _watch(comm, found)
    return found


def _bare_step(comm: Comm, found: Grown) -> None:
    ddp = DistributedDataParallel(nn.Linear(WIDTH, WIDTH), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.ones(1, WIDTH)
    for step in range(10 + CALLS):
        if step == 10:
            comm.barrier("bare")
            before = _now()
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    _note(comm, found, "a bare step", before, CALLS)


class _Trivial(safetrain.Trainer):
    before: tuple[float, int]

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        if self.step == 10:
            self.before = _now()
        return self.model(batch[0]).square().mean()


def _our_step(comm: Comm, found: Grown) -> None:
    """With the vote in the gradients; between two logging intervals, watched; and what comes before the first one."""
    steps = 10 + CALLS
    trainer = _Trivial(
        nn.Linear(WIDTH, WIDTH), TensorDataset(torch.ones(steps * comm.world_size, WIDTH)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), device="cpu",
        loop=safetrain.Loop(log_every_steps=1 << 30), loader=safetrain.Loader(batch_size=1),
        audit=safetrain.Audit(every_steps=0),
    )  # fmt: skip
    preflight = _Preflight()
    with mock.patch.object(checkup, "_run", preflight.counted(checkup._run)):
        trainer.fit()
    _note(comm, found, "a step of safetrain", trainer.before, CALLS)
    found.cpu_s["the preflight"] = preflight.cpu_s


class _Preflight:
    cpu_s = 0.0

    def counted(self, run: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: object) -> None:
            before = time.process_time()
            run(*arguments)
            self.cpu_s += time.process_time() - before

        return timed


def _watch(comm: Comm, found: Grown) -> None:
    """The watchdog's looks at the store, and what they cost, while the rank itself does nothing."""
    looks = 0
    ask = Board.inquiry

    def counted(board: Board) -> int:
        nonlocal looks
        looks += 1
        return ask(board)

    with mock.patch.object(Board, "inquiry", counted), watch(comm, safetrain.Watchdog(), None):
        before = time.process_time()
        time.sleep(WATCHED_S)
        found.cpu_s["a second of watching"] = (time.process_time() - before) / WATCHED_S
        found.looks_per_s = looks / WATCHED_S


@contextmanager
def _measured(comm: Comm, found: Grown, name: str, times: int) -> Iterator[None]:
    comm.barrier(name)
    before = _now()
    yield
    _note(comm, found, name, before, times)


def _note(comm: Comm, found: Grown, name: str, before: tuple[float, int], times: int) -> None:
    cpu_s = time.process_time() - before[0]
    comm.barrier(f"{name} done")
    found.cpu_s[name] = cpu_s / times
    found.segments[name] = (_segments() - before[1]) / times / comm.world_size


def _now() -> tuple[float, int]:
    return time.process_time(), _segments()


def _segments() -> int:
    """TCP segments that this machine has sent."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("OutSegs")])


def measure(ranks: int, rounds: int) -> Grown:
    """The median over rounds of the mean over ranks."""
    runs = [run_ranks(run_rank, ranks, timeout_s=120 + 10 * ranks) for _ in range(rounds)]
    mean = statistics.mean
    return Grown(
        {name: statistics.median(mean(one.cpu_s[name] for one in run) for run in runs) for name in runs[0][0].cpu_s},
        {
            name: statistics.median(mean(one.segments[name] for one in run) for run in runs)
            for name in runs[0][0].segments
        },
        statistics.median(mean(one.looks_per_s for one in run) for run in runs),
    )


HEADER = (
    "| ranks | vote in the gradients: CPU µs more than a bare step | its segments more | "
    "vote of its own: CPU µs | its segments | watching: CPU ms a second | looks at the store a second, of all ranks | "
    "an audit: CPU ms | the preflight: CPU ms |\n|---|---|---|---|---|---|---|---|---|"
)


def row(ranks: int, grown: Grown) -> str:
    cpu, segments = grown.cpu_s, grown.segments
    cells = [
        f"{1e6 * (cpu['a step of safetrain'] - cpu['a bare step']):.0f}",
        f"{segments['a step of safetrain'] - segments['a bare step']:.1f}",
        f"{1e6 * cpu['a vote of its own']:.0f}",
        f"{segments['a vote of its own']:.1f}",
        f"{1e3 * cpu['a second of watching']:.2f}",
        f"{ranks * grown.looks_per_s:.0f}",
        f"{1e3 * cpu['an audit']:.2f}",
        f"{1e3 * cpu['the preflight']:.0f}",
    ]
    return f"| {ranks} | {' | '.join(cells)} |"


def page(rows: Sequence[str], rounds: int) -> str:
    """The page that is kept."""
    hops = 2 * 1023
    return "\n".join(
        [
            f"# Growth with the number of ranks, {datetime.date.today().isoformat()}",
            "",
            f"torch {torch.__version__}, Python {platform.python_version()}, {cpu_model()}. Gloo, all ranks on this",
            f"machine, nothing to compute. Median of {rounds} rounds of the mean over ranks; segments are TCP's, sent",
            "by a rank.",
            "",
            HEADER,
            *rows,
            "",
            "What that means at 1,024 ranks:",
            "",
            "- On CPUs the vote is part of the last gradient bucket: not a message more, at any number of ranks.",
            f"- On GPUs it is an all-reduce of {WORDS} words on Gloo, a ring. A rank sends {2 * WORDS} messages at",
            f"  most, however many ranks there are. One after the other they are {hops:,}: at",
            f"  {1e6 * HOP_S:.0f} µs each {1e3 * hops * HOP_S:.0f} ms, beside the GPU's work.",
            f"- The watchdogs look at the store {_LOOKS_PER_S:,} times a second at most, all together: with 1,024",
            f"  ranks each every {max(0.25, 1024 / _LOOKS_PER_S):.2g} s. A look is a request of 25 to 100 µs.",
            f"- An audit (every 1,000 steps) gathers a checksum of each rank; a logging interval sums {NOTED} numbers",
            f"  a rank more, {8 * 1024 * NOTED / 1000:.0f} kB.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ranks", nargs="*", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where the page goes")
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"growth_{datetime.datetime.now():%Y-%m-%d_%H%M}.md"
    rows: list[str] = []
    print(HEADER)
    for ranks in options.ranks:
        rows.append(row(ranks, measure(ranks, options.rounds)))
        print(rows[-1], flush=True)
        file.write_text(page(rows, options.rounds), encoding="utf-8")
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    main()
