"""What a training step costs under safetrain and under the trainers that one would pick instead: the same work.

    pip install 'safetrain[bench]'
    python -m benchmarks.peers                     # about 15 minutes on 2 idle cores
    python -m benchmarks.peers gpt --rounds 12

All train in the same two ranks (torchrun, Gloo, one thread each) and take turns, the order turning from round to round;
each turn is a training of its own from the same weights, of which the first steps are not measured. Ratios to the bare
loop are taken round by round. At the end of each turn the weights must be those of the bare loop, to 1e-5: it was the
same work. (Some share a step's samples among ranks in another way. Sums are then rounded differently, and the weights
compared to 1e-3; where the model has batch statistics they differ, and are not compared.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import CONTENDERS, SAME_SHARES, CannotDo, quietly
from benchmarks.peers_table import HEADER, Cost, page, row
from benchmarks.workloads import RANKS, WORKLOADS, Workload
from safetrain.comm import Comm

DEFAULT = ("mlp_4ms", "mlp_4ms_accumulate", "mlp_4ms_bf16", "mlp_4ms_fp16", "resnet", "gpt", "gpt_accumulate")
WARMUP_STEPS, BLOCK_STEPS = 10, 10


class Stopwatch:
    """Measures blocks of ten steps, from tick to tick; what is done every ten steps is in each of them."""

    def __init__(self, first: int, accumulate: int, blocks: int) -> None:
        self._marks = {(first + n * BLOCK_STEPS) * accumulate for n in range(blocks + 1)}
        self._ticks = 0
        self._at: list[Cost] = []

    def tick(self) -> None:
        if self._ticks in self._marks:
            self._at.append(Cost(time.process_time(), time.perf_counter()))
        self._ticks += 1

    def cost(self) -> Cost:
        """Seconds a step: the median over blocks, since a shared machine disturbs some of them."""
        pairs = list(zip(self._at, self._at[1:], strict=False))
        return Cost(*(statistics.median(b[part] - a[part] for a, b in pairs) / BLOCK_STEPS for part in (0, 1)))


def run_rank(work: Workload, names: Sequence[str], steps: int, rounds: int) -> dict[str, Any]:
    """Of each contender: a rank's costs a step, round by round; or, in words, why it can't do the work."""
    Comm.join(device="cpu")
    found: dict[str, Any] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first is not kept: code is imported
        weights: dict[str, list[torch.Tensor]] = {}
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if isinstance(found[name], str):
                continue
            watch = Stopwatch(WARMUP_STEPS, work.accumulate, steps // BLOCK_STEPS)
            try:
                model = quietly(CONTENDERS[name], work, WARMUP_STEPS + steps + 1, watch.tick)
            except CannotDo as refused:
                found[name] = str(refused)
                continue
            weights[name] = [parameter.detach().clone() for parameter in model.parameters()]
            if number:
                found[name].append(watch.cost())
        for name, mine in weights.items():
            if name in SAME_SHARES or not work.batch_norm:
                exact = name in SAME_SHARES and work.dtype is torch.float32
                check_same(name, mine, weights["bare loop"], tolerance=1e-5 if exact else 1e-3)
    return found


def check_same(name: str, mine: Sequence[torch.Tensor], others: Sequence[torch.Tensor], *, tolerance: float) -> None:
    """Raise where the weights after the training are not the same; half precision rounds more."""
    for one, other in zip(mine, others, strict=True):
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
            by = float((one - other).abs().max())
            raise AssertionError(f"{name}: weights differ from the bare loop's by {by:.2g}: it was other work")


def measure(name: str, names: Sequence[str], steps: int, rounds: int) -> dict[str, list[Cost] | str]:
    """Of each contender: costs a step, the mean over the ranks, round by round; or why it can't do the work."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
            "-m", "benchmarks.peers", name, "--steps", str(steps), "--rounds", str(rounds),
            "--contenders", *names, "--as-rank", folder,
        ]  # fmt: skip
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{done.stderr[-4000:]}\n{name}: a rank failed")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    found: dict[str, list[Cost] | str] = {}
    for contender, of_rank_0 in ranks[0].items():
        if isinstance(of_rank_0, str):
            found[contender] = of_rank_0
            continue
        by_round = zip(*(rank[contender] for rank in ranks), strict=True)
        found[contender] = [Cost(*(statistics.mean(values) for values in zip(*one, strict=True))) for one in by_round]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="name")
    parser.add_argument("--steps", type=int, default=100, help="measured optimizer steps a turn, in blocks of 10")
    parser.add_argument("--rounds", type=int, default=10, help="rounds, each with a turn of every contender")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where the page goes")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if "bare loop" not in options.contenders:
        parser.error("all are compared with 'bare loop': name it, too")
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}: there are {', '.join(WORKLOADS)}")
    if options.as_rank is not None:
        found = run_rank(WORKLOADS[options.workloads[0]], options.contenders, options.steps, options.rounds)
        Path(options.as_rank, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
        return
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"peers_{datetime.datetime.now():%Y-%m-%d_%H%M}.md"
    rows: list[str] = []
    print(HEADER)
    for name in options.workloads or DEFAULT:
        costs = measure(name, options.contenders, options.steps, options.rounds)
        new = [row(WORKLOADS[name], contender, cost, costs["bare loop"]) for contender, cost in costs.items()]
        print("\n".join(new), flush=True)
        rows += new
        file.write_text(page(rows, options.steps, options.rounds), encoding="utf-8")
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    main()
