"""The table of benchmarks.peers."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from benchmarks.contenders import SAME_SHARES
from benchmarks.table import cpu_model, milliseconds, ratio
from benchmarks.workloads import RANKS, Workload

COLUMNS = ("workload", "accumulate", "trainer", "CPU ms a step", "CPU ratio", "wall ms a step", "wall ratio")
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
PACKAGES = ("safetrain", "torch", "lightning", "accelerate", "transformers")


class Cost(NamedTuple):
    """Seconds a step on one rank: CPU of all threads, and wall."""

    cpu_s: float
    wall_s: float


def row(work: Workload, contender: str, costs: Sequence[Cost] | str, bare: Sequence[Cost] | str) -> str:
    """A line of the table; ratios are paired by round."""
    cells = [work.title, str(work.accumulate), contender]
    if isinstance(costs, str) or isinstance(bare, str):
        return f"| {' | '.join(cells)} | refuses: {str(costs).replace('|', '/')} | | | |"
    cpu, wall = [one.cpu_s for one in costs], [one.wall_s for one in costs]
    cells += [milliseconds(cpu), ratio([one.cpu_s for one in bare], cpu)]
    cells += [milliseconds(wall), ratio([one.wall_s for one in bare], wall)]
    return f"| {' | '.join(cells)} |"


def page(rows: Sequence[str], steps: int, rounds: int) -> str:
    """The page that is kept."""
    lines = [
        f"# A step beside other trainers, {datetime.date.today().isoformat()}",
        "",
        f"{', '.join(map(with_version, PACKAGES))}, Python {platform.python_version()}, {cpu_model()}.",
        f"{RANKS} ranks on Gloo, one thread each. {rounds} rounds, in each {steps} measured steps of every trainer, in",
        f"turns. After each turn {', '.join(SAME_SHARES[1:])} had the bare loop's weights to 1e-5, the others to 1e-3",
        "(not compared with batch statistics); all to 1e-3 in half precision.",
        "",
        "Milliseconds are a step's on one rank, CPU that of all its threads; of a turn the median over blocks of ten",
        "steps, then median (quartiles) over rounds. Ratios compare with the bare loop within a round: median [95 %",
        "interval of the median].",
        "",
        HEADER,
        *rows,
        "",
    ]
    return "\n".join(lines)


def with_version(package: str) -> str:
    if package == "torch":
        return f"torch {torch.__version__}"
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"without {package}"
