"""Times of loops that took turns, as lines of a Markdown table: medians, their spread, and paired ratios."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

from safetrain.medians import interval_of_median, quartiles

COLUMNS = (
    "workload", "accumulate", "bare CPU ms", "safetrain CPU ms", "extra CPU µs", "CPU ratio",
    "watching: extra CPU µs", "watching: CPU ratio", "bare wall ms", "safetrain wall ms", "wall ratio",
)  # fmt: skip
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


@dataclass
class Times:
    """Seconds a step, one entry a block: CPU of all threads of this process, and wall."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    @contextmanager
    def block(self, steps: int) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu_s.append((time.process_time() - cpu) / steps)
        self.wall_s.append((time.perf_counter() - wall) / steps)


def row(title: str, accumulate: int, *, bare: Times, unwatched: Times, safetrain: Times) -> str:
    """A line of the table: medians with quartiles; ratios are paired by round."""
    ours = safetrain
    cells = [
        title,
        str(accumulate),
        milliseconds(bare.cpu_s),
        milliseconds(ours.cpu_s),
        _extra(bare.cpu_s, ours.cpu_s),
        ratio(bare.cpu_s, ours.cpu_s),
        _extra(unwatched.cpu_s, ours.cpu_s),
        ratio(unwatched.cpu_s, ours.cpu_s),
        milliseconds(bare.wall_s),
        milliseconds(ours.wall_s),
        ratio(bare.wall_s, ours.wall_s),
    ]
    return "| " + " | ".join(cells) + " |"


def milliseconds(seconds: Sequence[float]) -> str:
    middle, low, high = (1e3 * value for value in quartiles(seconds))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _extra(bare: Sequence[float], ours: Sequence[float]) -> str:
    extra, low, high = quartiles([1e6 * (b - a) for a, b in zip(bare, ours, strict=True)])
    return f"{extra:.0f} ({low:.0f} to {high:.0f})"


def ratio(bare: Sequence[float], ours: Sequence[float]) -> str:
    ratios = [b / a for a, b in zip(bare, ours, strict=True)]
    low, high = interval_of_median(ratios)
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.machine()


def page(rows: Sequence[str], ranks: int, steps: int, rounds: int) -> str:
    """The page that is kept."""
    versions = f"safetrain {version('safetrain')}, torch {torch.__version__}, Python {platform.python_version()}"
    lines = [
        f"# Cost of a step, {datetime.date.today().isoformat()}",
        "",
        f"{versions}, {cpu_model()}. {ranks} ranks on Gloo, one thread each.",
        f"{rounds} rounds, in each {steps} optimizer steps of every loop, in turns. Weights equal bit for bit.",
        "",
        "Milliseconds are a step's on one rank, CPU that of all its threads: median (quartiles) over rounds. Extra and",
        "ratios compare the loops within a round: median (quartiles), and median [95 % interval of the median].",
        "Watching: against the same loop without watchdog and notes; torch's flight recorder is on in both.",
        "",
        HEADER,
        *rows,
        "",
    ]
    return "\n".join(lines)
