"""Data and metrics on real ranks: what each reads and what all come to know."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from safetrain.comm import Comm
from safetrain.config import Loader
from safetrain.data import Feed, build_loader
from safetrain.metrics import MetricLog, in_dataset_order
from safetrain.seeding import seed_process
from safetrain.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

WORLD_SIZES = [2, 4]


class Values(Dataset[Any]):
    """Samples (index, value) whose sum depends on the order of adding."""

    def __init__(self, samples: int) -> None:
        self.values = torch.randn(samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e3

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return index, self.values[index]


class Draws(Dataset[Any]):
    """Samples (worker, three random numbers)."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return info.id if info else 0, [random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()]


def feed_of(comm: Comm, data: Any, *, train: bool, **options: Any) -> Feed:
    loader = build_loader(
        data, Loader(batch_size=4, **options), rank=comm.rank, world_size=comm.world_size, seed=3, train=train
    )
    return Feed(loader, comm.device)


def batches(feed: Feed, epoch: int = 0) -> list[Any]:
    feed.begin_epoch(epoch)
    given = []
    while not (fetched := feed.take()).empty:
        assert fetched.error is None
        given.append(fetched.batch)
    return given


def indices(feed: Feed, epoch: int = 0) -> list[int]:
    return [index for batch in batches(feed, epoch) for index in batch[0].tolist()]


def _epochs(comm: Comm) -> list[list[list[int]]]:
    feed = feed_of(comm, Values(24), train=True)
    return [comm.gather(indices(feed, epoch)) for epoch in (0, 1)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_h60_epochs_differ_and_shares_are_disjoint_and_complete(world_size: int) -> None:
    on_ranks = run_ranks(_epochs, world_size)
    assert on_ranks[0] == on_ranks[-1]
    first, second = on_ranks[0]
    for shares in (first, second):
        assert [len(share) for share in shares] == [24 // world_size] * world_size
        assert sorted(index for share in shares for index in share) == list(range(24))
    assert first[0] != second[0]
    assert first[-1] != second[-1]


def _evaluate(comm: Comm, samples: int, workers: int) -> tuple[dict[str, float], list[int]]:
    log, seen = MetricLog(), []
    for index, values in batches(feed_of(comm, Values(samples), train=False, num_workers=workers)):
        log.add("value", values)
        log.add("count", len(values), how="sum")
        log.add("largest", values, how="max")
        seen += index.tolist()
    return log.reduce(comm), in_dataset_order(comm.gather(seen))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("samples", [21, 25, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_h62_h63_evaluation_is_that_of_one_process_to_the_last_digit(
    world_size: int, samples: int, workers: int
) -> None:
    doubles = Values(samples).values.tolist()
    expected = {"count": samples, "largest": max(doubles), "value": math.fsum(doubles) / samples}
    on_ranks = run_ranks(_evaluate, world_size, samples, workers)
    for rank in (0, world_size - 1):
        assert on_ranks[rank] == (expected, list(range(samples)))


def _read_with_a_rank_seeded_sampler(comm: Comm) -> list[list[int]]:
    data = Values(20)
    sampler: DistributedSampler[Any] = DistributedSampler(data, comm.world_size, comm.rank, seed=comm.rank)
    return comm.gather(indices(feed_of(comm, DataLoader(data, batch_size=4, sampler=sampler), train=True)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_h65_a_sampler_seeded_by_rank_still_covers_the_set_once(world_size: int) -> None:
    on_ranks = run_ranks(_read_with_a_rank_seeded_sampler, world_size)
    assert on_ranks[0] == on_ranks[-1]
    assert sorted(index for share in on_ranks[0] for index in share) == list(range(20))


def _read_buckets(comm: Comm) -> list[list[list[int]]]:
    buckets = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13]]
    feed = feed_of(comm, DataLoader(Values(14), batch_sampler=buckets), train=True)
    return comm.gather([batch[0].tolist() for batch in batches(feed)])


def test_h68_whole_batches_of_a_hand_made_batch_sampler_are_dealt_out() -> None:
    expected = [[[0, 1, 2], [6, 7, 8], [12, 13]], [[3, 4, 5], [9, 10, 11]]]
    on_ranks = run_ranks(_read_buckets, 2)
    assert on_ranks[0] == on_ranks[-1] == expected


def _first_draws(comm: Comm, workers: int) -> list[tuple[float, ...]]:
    """The first draws of each worker of each rank in each of two epochs."""
    seed_process(3, comm.rank)
    feed = feed_of(comm, Draws(), train=True, num_workers=workers)
    first: dict[tuple[int, int], tuple[float, ...]] = {}
    for epoch in (0, 1):
        for ids, numbers in batches(feed, epoch):
            first.setdefault((epoch, int(ids[0])), tuple(float(kind[0]) for kind in numbers))
    return [numbers for ranks_own in comm.gather(list(first.values())) for numbers in ranks_own]


@pytest.mark.parametrize("workers", [0, 2])
def test_h69_random_streams_differ_by_rank_worker_and_epoch_and_come_again(workers: int) -> None:
    on_ranks = run_ranks(_first_draws, 2, workers)
    draws = on_ranks[0]
    assert on_ranks[-1] == draws
    assert len(draws) == 2 * 2 * max(1, workers)
    for kind in zip(*draws, strict=True):  # random, numpy, torch
        assert len(set(kind)) == len(draws)
    assert run_ranks(_first_draws, 2, workers)[0] == draws


def _accuracy(comm: Comm) -> dict[str, float]:
    log = MetricLog()
    log.add("accuracy", torch.ones(9) if comm.rank == 0 else torch.zeros(1))
    if comm.rank == comm.world_size - 1:
        log.add("only_here", 2.0, weight=5)
    return log.reduce(comm) | {f"fast_{name}": value for name, value in _fast(comm).items()}


def _fast(comm: Comm) -> dict[str, float]:
    log = MetricLog()
    log.add("accuracy", 1.0 if comm.rank == 0 else 0.0, weight=9 if comm.rank == 0 else 1)
    return log.sum_fast(comm)[0]


def test_h96_accuracy_is_that_of_all_samples_not_the_average_of_the_ranks() -> None:
    on_ranks = run_ranks(_accuracy, 2)
    assert on_ranks[0] == on_ranks[-1] == {"accuracy": 0.9, "only_here": 2.0, "fast_accuracy": 0.9}
