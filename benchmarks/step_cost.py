"""What a training step costs: safetrain's Trainer beside a hand-written DDP loop that does the same work.

    python -m benchmarks.step_cost                      # the usual workloads, about 5 minutes on 2 idle cores
    python -m benchmarks.step_cost mlp --rounds 40

The loops live in the same two ranks (forked, Gloo, one thread each) and take turns: a block of steps of one, then of
another, the order changing from round to round. What disturbs the machine disturbs all, so their ratios are taken
round by round. The third one is safetrain with nobody watching: no watchdog, no notes of collectives. CPU time is that
of all threads of a rank; it is steadier than wall time, which waits for whoever else uses the cores. At the end the
models must be equal, bit for bit: it was the same work.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import safetrain
from benchmarks.table import HEADER, Times, page, row
from benchmarks.workloads import RANKS, SEED, WORKLOADS, BareLoop, Workload
from safetrain.activity import Activity
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from safetrain.watchdog import watch

DEFAULT = ("mlp", "mlp_accumulate", "mlp_unclipped", "mlp_4ms", "many_small", "many_small_accumulate", "resnet", "gpt")


class TakingTurns(safetrain.Trainer):
    """Trains as a user's Trainer does; each epoch is a block, and between epochs the bare loop has its blocks.

    A round is bare, unwatched, safetrain, bare; in every other one the two in the middle change places.
    """

    def __init__(self, work: Workload, steps: int, bare: BareLoop, rounds: int) -> None:
        super().__init__(
            work.build_model(),
            work.build_data(steps),
            optimizer=work.build_optimizer,
            loop=safetrain.Loop(epochs=2 * rounds, accumulate=work.accumulate, clip_norm=work.clip_norm),
            loader=safetrain.Loader(batch_size=work.batch_size),
            watchdog=safetrain.Watchdog(enabled=False),  # switched on and off here
            preflight=safetrain.Preflight(enabled=False),
            seed=SEED,
            device="cpu",
        )
        self.times = {"bare": Times(), "unwatched": Times(), "safetrain": Times()}
        middles = (["unwatched", "safetrain"], ["safetrain", "unwatched"])
        self._turns = iter([loop for n in range(rounds) for loop in ("bare", *middles[n % 2], "bare")])
        self._work, self._steps, self._bare = work, steps, bare
        self._turn = ExitStack()

    def build_model(self) -> nn.Module:
        return self._work.build_model()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        samples, labels = batch
        return self._work.loss(self.model, samples, labels)

    def on_epoch_start(self) -> None:
        self._turn.close()
        while (loop := next(self._turns)) == "bare":
            self._run_bare()
        self._turn.enter_context(watch(self.comm, safetrain.Watchdog(), None) if loop == "safetrain" else self._off())
        self._turn.enter_context(self.times[loop].block(self._steps))

    def run(self) -> dict[str, Times]:
        """Seconds a step of the loops, round by round."""
        self.fit()
        self._turn.close()
        for _ in self._turns:
            self._run_bare()
        bare = self.times["bare"]
        return {**self.times, "bare": Times(_means_of_pairs(bare.cpu_s), _means_of_pairs(bare.wall_s))}

    def _run_bare(self) -> None:
        with self.times["bare"].block(self._steps):
            self._bare.train_epoch()

    @contextmanager
    def _off(self) -> Iterator[None]:
        """Nobody watches: no thread looks, the loop does not say where it is, no collective is noted."""
        compares = self.comm.collectives.compares
        self.comm.collectives.compares = False
        with mock.patch.object(Activity, "enter", _note_nothing):
            yield
        self.comm.collectives.compares = compares


def _note_nothing(_activity: Activity, _phase: str) -> None:
    pass


def _means_of_pairs(values: Sequence[float]) -> list[float]:
    return [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]


def run_rank(comm: Comm, work: Workload, steps: int, rounds: int) -> dict[str, Times]:
    """One rank's times; the first round (buckets are rebuilt, memory is found) is left out."""
    bare = BareLoop(work, steps, comm.rank, comm.world_size)
    trainer = TakingTurns(work, steps, bare, rounds + 1)
    times = trainer.run()
    # not the buffers: at the end of a run they are rank 0's everywhere
    for (name, mine), theirs in zip(trainer.model.named_parameters(), bare.model.parameters(), strict=True):
        if not torch.equal(mine, theirs):
            raise AssertionError(f"{name} differs from the bare loop's: the loops did not do the same work")
    return {loop: Times(of.cpu_s[1:], of.wall_s[1:]) for loop, of in times.items()}


def measure(work: Workload, steps: int, rounds: int) -> dict[str, Times]:
    """Seconds a step of the loops, round by round: the mean over the ranks."""
    ranks = run_ranks(run_rank, RANKS, work, steps, rounds, timeout_s=60 + 4.0 * steps * (rounds + 1))
    return {
        loop: Times(
            [statistics.mean(values) for values in zip(*(times[loop].cpu_s for times in ranks), strict=True)],
            [statistics.mean(values) for values in zip(*(times[loop].wall_s for times in ranks), strict=True)],
        )
        for loop in ranks[0]
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps a block")
    parser.add_argument("--rounds", type=int, default=16, help="rounds, each with a block of every loop")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="where the page goes")
    options = parser.parse_args(arguments)
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}: there are {', '.join(WORKLOADS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"step_cost_{datetime.datetime.now():%Y-%m-%d_%H%M}.md"
    rows: list[str] = []
    print(HEADER)
    for name in options.workloads or DEFAULT:
        work = WORKLOADS[name]
        rows.append(row(work.title, work.accumulate, **measure(work, options.steps, options.rounds)))
        print(rows[-1], flush=True)
        file.write_text(page(rows, RANKS, options.steps, options.rounds), encoding="utf-8")
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    main()
