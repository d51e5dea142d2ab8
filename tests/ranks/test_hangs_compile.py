"""HANGS N: ``torch.compile`` under the loop, where shapes change, on all ranks or on one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_clean, end_of, feed, windows_of
from tests.ranks.toys import CLASSES, FEATURES, Batch, Classifier, assert_close, momentum_sgd, samples, train_alone

COMPILE_S = 2.0
STALL_S = 0.5
GRAPHS = 3


class Inside(nn.Module):
    """A model of the user's own: torch 2.13 does not compile a bare nn.Sequential in place. A wide one has several
    gradient buckets."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Compiled(Classifier):
    """Compiles its model, without a C++ compiler; ``compiled`` counts the graphs that this process made."""

    compiler: Any
    compiled = 0

    def build_model(self) -> nn.Module:
        model = super().build_model()

        def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            self.compiled += 1
            if self.compiled > 1 and self.comm.rank in self.slow:
                time.sleep(COMPILE_S)
            return graph.forward

        model.compile(backend=count, dynamic=False)
        return model

    slow: tuple[int, ...] = ()


def _batches(world_size: int, sizes: Callable[[int, int], int], windows: int = 4) -> list[list[Batch]]:
    """``sizes`` of a rank and a window."""
    return [
        [samples(sizes(rank, window), seed=100 * rank + window) for window in range(windows)]
        for rank in range(world_size)
    ]


def _train(
    comm: Comm, batches: list[list[Batch]], slow: tuple[int, ...], width: int, strategy: safetrain.DDPStrategy
) -> tuple[Ended, int]:
    trainer = Compiled(
        Inside(width), feed(batches), optimizer=momentum_sgd, strategy=strategy,
        loop=safetrain.Loop(nominal_weight=16),
        watchdog=safetrain.Watchdog(stall_s=STALL_S, first_step_stall_s=60, poll_s=0.05),
    )  # fmt: skip
    trainer.slow = slow
    ended = end_of(trainer)
    return ended, trainer.compiled


def test_h94_one_rank_recompiles_and_the_others_do_not(place: Place) -> None:
    """Reported: deadlock, since what is run to compile communicates; or the others run into a time limit. Here a rank
    that compiles is waited for, however long it takes, and nobody is blamed."""
    batches = _batches(place.world_size, lambda rank, window: 7 if (rank, window) == (place.culprit, 2) else 16)
    got = run_ranks(_train, place.world_size, batches, (place.culprit,), 16, safetrain.DDPStrategy(), timeout_s=60)
    ended, compiled = zip(*got, strict=True)
    assert_clean(ended, step=4)
    assert compiled == tuple(2 if rank == place.culprit else 1 for rank in range(place.world_size))
    alone = run_ranks(lambda _: train_alone(Inside(), windows_of(batches), momentum_sgd), 1)[0]
    assert_close(ended[-1].state, alone)
    assert_close(ended[0].state, alone)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_h95_the_last_batch_is_smaller(world_size: int) -> None:
    """Reported: a crash in what splits the compiled graph at DDP's buckets. It is split here, too, into as many graphs
    for the second size as for the first."""
    batches = _batches(world_size, lambda rank, window: 7 if window == 3 else 16)
    buckets = safetrain.DDPStrategy(bucket_cap_mb=1)  # a layer of 600 x 600 has 1.4 MiB
    ended, compiled = zip(*run_ranks(_train, world_size, batches, (), 600, buckets, timeout_s=60), strict=True)
    assert_clean(ended, step=4)
    assert compiled[0] == compiled[-1] == 2 * GRAPHS
    alone = run_ranks(lambda _: train_alone(Inside(600), windows_of(batches), momentum_sgd), 1)[0]
    assert_close(ended[0].state, alone)
    assert_close(ended[-1].state, alone)
