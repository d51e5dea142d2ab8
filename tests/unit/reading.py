"""Reading a rank's share in one process: the helpers of the data tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from safetrain.config import Loader
from safetrain.data import Feed, build_loader

CPU = torch.device("cpu")


def feed_of(data: Any, rank: int, world_size: int, *, train: bool = True, seed: int = 0, **options: Any) -> Feed:
    loader = build_loader(
        data, Loader(**{"batch_size": 4} | options), rank=rank, world_size=world_size, seed=seed, train=train
    )
    return Feed(loader, CPU)


def loader_of(data: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, **settings)


def sampler_of(data: Any, ranks: int, rank: int, **settings: Any) -> DistributedSampler[int]:
    return DistributedSampler(data, ranks, rank, **settings)


def read(feed: Feed, epoch: int = 0, skip_batches: int = 0) -> list[list[int]]:
    """The batches of an epoch, of data whose samples are their own indices."""
    feed.begin_epoch(epoch, skip_batches)
    batches = []
    while not (fetched := feed.take()).empty:
        assert fetched.error is None
        batches.append(fetched.batch.tolist())
    return batches


def samples(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def read_all(data: Any, world_size: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    """Each rank's batches."""
    return [read(feed_of(data, rank, world_size, **options), epoch) for rank in range(world_size)]


class Buckets(Sampler[list[int]]):
    """A hand-made batch sampler that knows no ranks; shuffles its batches with the global generator."""

    def __init__(self, samples: int, size: int, *, shuffle: bool = False) -> None:
        self.buckets = [list(range(start, min(start + size, samples))) for start in range(0, samples, size)]
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.buckets)).tolist() if self.shuffle else range(len(self.buckets))
        return iter([self.buckets[index] for index in order])

    def __len__(self) -> int:
        return len(self.buckets)
