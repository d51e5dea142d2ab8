"""What a training step costs: safetrain's Trainer beside a hand-written DDP loop that does the same work.

    python -m benchmarks.step_cost                      # all workloads, about 5 minutes on 2 idle cores
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
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import safetrain
from benchmarks.table import HEADER, Times, page, row
from safetrain.activity import Activity
from safetrain.comm import Comm
from safetrain.recipes.resnet_ddp import ResNet
from safetrain.testing import run_ranks
from safetrain.watchdog import watch

RANKS = 2
SEED = 0
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how it is trained; ``batch_size`` is a rank's."""

    title: str
    build_model: Callable[[], nn.Module]
    sample_shape: tuple[int, ...]
    batch_size: int = 32
    accumulate: int = 1
    clip_norm: float | None = 1.0

    def build_optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def build_data(self, steps: int) -> Dataset[Any]:
        """Random samples for ``steps`` optimizer steps."""
        generator = torch.Generator().manual_seed(SEED)
        count = steps * self.accumulate * self.batch_size * RANKS
        return TensorDataset(
            torch.randn(count, *self.sample_shape, generator=generator),
            torch.randint(CLASSES, (count,), generator=generator),
        )


def mlp(width: int = 256, layers: int = 4) -> nn.Module:
    hidden = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


class ManySmall(nn.Module):
    """As many parameter tensors as a large model, each of them tiny: the worst case for what is done once a tensor."""

    def __init__(self, tensors: int = 200, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(tensors // 2 - 1))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, samples: Tensor) -> Tensor:
        for layer in self.layers:
            samples = samples + layer(samples)
        return self.head(samples)


WORKLOADS = {
    "mlp": Workload("MLP 4x256", mlp, (256,)),
    "mlp_accumulate": Workload("MLP 4x256", mlp, (256,), accumulate=4),
    "mlp_unclipped": Workload("MLP 4x256, no clipping", mlp, (256,), clip_norm=None),
    "many_small": Workload("200 tiny parameter tensors", ManySmall, (16,)),
    "many_small_accumulate": Workload("200 tiny parameter tensors", ManySmall, (16,), accumulate=4),
    "resnet": Workload("ResNet of recipe=resnet_ddp, 8x8", functools.partial(ResNet, CLASSES), (3, 8, 8)),
}


class BareLoop:
    """What one writes by hand for the same training: no logging, no checks, nothing counted."""

    def __init__(self, work: Workload, steps: int, comm: Comm) -> None:
        torch.manual_seed(SEED)
        self.model = work.build_model()
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._optimizer = work.build_optimizer(self.model.parameters())
        data = work.build_data(steps)
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            data, comm.world_size, comm.rank, seed=SEED, drop_last=True
        )
        self._loader = DataLoader(data, work.batch_size, sampler=self._sampler)
        self._accumulate, self._clip_norm = work.accumulate, work.clip_norm
        self._epoch = 0

    def train_epoch(self) -> None:
        ddp, optimizer, accumulate = self._ddp, self._optimizer, self._accumulate
        ddp.train()
        self._sampler.set_epoch(self._epoch)
        for index, (samples, labels) in enumerate(self._loader):
            last = (index + 1) % accumulate == 0
            with nullcontext() if last else ddp.no_sync():
                loss = F.cross_entropy(ddp(samples), labels)
                (loss if accumulate == 1 else loss / accumulate).backward()
            if last:
                if self._clip_norm is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
                optimizer.step()
                optimizer.zero_grad()
        self._epoch += 1


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
        return F.cross_entropy(self.model(samples), labels)

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
    bare = BareLoop(work, steps, comm)
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
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"of {', '.join(WORKLOADS)}; default: all")
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
    for name in options.workloads or WORKLOADS:
        work = WORKLOADS[name]
        rows.append(row(work.title, work.accumulate, **measure(work, options.steps, options.rounds)))
        print(rows[-1], flush=True)
        file.write_text(page(rows, RANKS, options.steps, options.rounds), encoding="utf-8")
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    main()
