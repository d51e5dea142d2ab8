"""From the command to the first step, from the last step to the last process gone, and the most memory a rank has held.

    python -m benchmarks.start_and_leave           # about 8 minutes on 2 idle cores
    python -m benchmarks.start_and_leave --rounds 3 --contenders 'bare loop' safetrain

Every trainer is started by torchrun as a script of its own; safetrain also by its own launcher, with all that comes
with it (Hydra, a run directory, observers, the preflight). "Nothing" is torchrun with ranks that import this file, and
step at once. This file imports safetrain, so all of these scripts, the bare loop's too, have paid for that: the ratios
leave safetrain's own import out. They take turns, and ratios to the bare loop are taken round by round.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.contenders import CONTENDERS, quietly
from benchmarks.peers_table import PACKAGES, with_version
from benchmarks.table import cpu_model, milliseconds, ratio
from benchmarks.workloads import RANKS, WORKLOADS
from safetrain.memory import peak_bytes

NOTHING, LAUNCHED = "nothing", "safetrain, its own launcher"
WORK = "mlp"
STEPS = 20
COLUMNS = (
    "trainer", "to the first step, ms", "ratio", "from the last step to the end, ms", "peak memory of a rank, MiB",
    "ratio",
)  # fmt: skip
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
RECIPE = """# @package _global_
trainer: {_target_: benchmarks.launched.OneMLP}
data: {train: {_target_: benchmarks.launched.data}}
model: {_target_: benchmarks.workloads.mlp}
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.01, momentum: 0.9}
loop: {clip_norm: 1.0}
"""


class Life(NamedTuple):
    """Of one run: seconds, and bytes of the rank that held the most."""

    to_first_step_s: float
    to_end_s: float
    peak_bytes: float


def run_rank(name: str) -> None:
    """One rank's script; tells the time of its first and last step, and its memory, by a line on standard output."""
    if name == NOTHING:
        tell_step()
        tell_memory()
        return
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks in (1, STEPS):
            tell_step()

    if name == "bare loop":  # the others join by themselves
        dist.init_process_group("gloo")
    quietly(CONTENDERS[name], WORKLOADS[WORK], STEPS, tick)
    tell_memory()
    if name == "bare loop":
        dist.destroy_process_group()


def tell_step() -> None:
    print(f"\nSTEP {time.time()}", flush=True)


def tell_memory() -> None:
    """The most that this process has held, as the kernel counts it."""
    print(f"\nPEAK {peak_bytes():.0f}", flush=True)


def live(name: str) -> Life:
    """Start it, and look at its life from outside."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*torchrun, "-m", "benchmarks.start_and_leave", "--as-rank", name]
    with tempfile.TemporaryDirectory() as folder:
        if name == LAUNCHED:
            recipe = Path(folder, "recipe", "life.yaml")
            recipe.parent.mkdir()
            recipe.write_text(RECIPE)
            command = [sys.executable, "-m", "safetrain", "recipe=life", f"launch.nproc_per_node={RANKS}"]
        began = time.time()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        ended = time.time()
        said = done.stdout + "".join(path.read_text() for path in Path(folder).rglob("logs/rank_*.log"))
    if done.returncode:
        sys.exit(f"{said[-2000:]}{done.stderr[-4000:]}\n{name}: a rank failed")
    steps = [float(one) for one in re.findall(r"STEP (\S+)", said)]
    peaks = [float(one) for one in re.findall(r"PEAK (\S+)", said)]
    return Life(max(sorted(steps)[:RANKS]) - began, ended - max(steps), max(peaks))


def row(name: str, lives: Sequence[Life], bare: Sequence[Life]) -> str:
    """A line of the table."""
    first, end, peak = (list(values) for values in zip(*lives, strict=True))
    bare_first, _, bare_peak = (list(values) for values in zip(*bare, strict=True))
    in_mib = [value / (1 << 20) / 1000 for value in peak]  # milliseconds() multiplies by 1000
    cells = [
        milliseconds(first),
        ratio(bare_first, first),
        milliseconds(end),
        milliseconds(in_mib),
        ratio(bare_peak, peak),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def page(rows: Sequence[str], rounds: int) -> str:
    """The page that is kept."""
    return "\n".join(
        [
            f"# Starting and leaving, {datetime.date.today().isoformat()}",
            "",
            f"{', '.join(map(with_version, PACKAGES))}, Python {platform.python_version()}, {cpu_model()}.",
            f"{RANKS} ranks on Gloo, {STEPS} steps of {WORKLOADS[WORK].title}, {rounds} rounds in turns: median",
            "(quartiles), ratios to the bare loop within a round: median [95 % interval of the median]. Every script",
            "has imported safetrain, the bare loop's too: that import is in none of the ratios.",
            "",
            HEADER,
            *rows,
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [NOTHING, *CONTENDERS, LAUNCHED]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, metavar="name")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where the page goes")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if "bare loop" not in options.contenders:
        parser.error("all are compared with 'bare loop': name it, too")
    if options.as_rank is not None:
        run_rank(options.as_rank)
        return
    lives: dict[str, list[Life]] = {name: [] for name in options.contenders}
    for number in range(options.rounds + 1):  # the first is not kept: files are read from the disk
        for name, known in lives.items():
            life = live(name)
            if number:
                known.append(life)
    rows = [row(name, known, lives["bare loop"]) for name, known in lives.items()]
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"start_and_leave_{datetime.datetime.now():%Y-%m-%d_%H%M}.md"
    file.write_text(page(rows, options.rounds), encoding="utf-8")
    print("\n".join([HEADER, *rows, "", f"written to {file}"]))


if __name__ == "__main__":
    main()
