"""Who reads what: shares are disjoint, complete and reordered each epoch, and foreign samplers are split or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from safetrain.config import Loader
from safetrain.data import Feed, build_loader
from safetrain.errors import DataError, UsageError

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


class TestOrdinaryData:
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_h60_orders_differ_between_epochs_and_shares_are_disjoint_and_complete(self, world_size: int) -> None:
        data = list(range(24))
        feeds = [feed_of(data, rank, world_size) for rank in range(world_size)]
        orders = [[samples(read(feed, epoch)) for feed in feeds] for epoch in (0, 1)]
        for shares in orders:
            assert sorted(samples(shares)) == data
        for rank in (0, world_size - 1):
            assert orders[0][rank] != orders[1][rank]
            assert samples(read(feeds[rank], epoch=0)) == orders[0][rank]

    def test_the_order_is_torchs_own_distributed_sampler(self) -> None:
        data = list(range(25))
        for rank in (0, 1):
            expected = sampler_of(data, 2, rank, seed=5, drop_last=True)
            expected.set_epoch(3)
            assert samples(read(feed_of(data, rank, 2, seed=5), epoch=3)) == list(expected)

    @pytest.mark.parametrize(("world_size", "left_out"), [(2, 1), (3, 1), (4, 1), (7, 4)])
    def test_drop_last_leaves_out_the_remainder_and_makes_shares_equal(self, world_size: int, left_out: int) -> None:
        shares = [samples(batches) for batches in read_all(list(range(25)), world_size)]
        assert {len(share) for share in shares} == {25 // world_size}
        assert len(set(samples(shares))) == 25 - left_out

    def test_without_drop_last_every_sample_is_used_once_and_none_twice(self) -> None:
        shares = [samples(batches) for batches in read_all(list(range(25)), 4, drop_last=False)]
        assert [len(share) for share in shares] == [7, 6, 6, 6]
        assert sorted(samples(shares)) == list(range(25))
        assert samples(shares) != list(range(25)), "training data is shuffled"

    def test_the_last_smaller_batch_is_kept(self) -> None:
        assert [len(batch) for batch in read(feed_of(list(range(20)), 1, 2))] == [4, 4, 2]

    def test_without_shuffle_the_order_is_the_datasets(self) -> None:
        assert read(feed_of(list(range(8)), 1, 2, shuffle=False)) == [[1, 3, 5, 7]]

    @pytest.mark.parametrize(("world_size", "shares"), [(2, [[0, 2, 4], [1, 3]]), (4, [[0, 4], [1], [2], [3]])])
    def test_evaluation_reads_each_sample_once_in_order(self, world_size: int, shares: list[list[int]]) -> None:
        given = read_all(list(range(5)), world_size, train=False)
        assert [samples(batches) for batches in given] == shares

    def test_evaluation_with_fewer_samples_than_ranks_leaves_ranks_empty(self) -> None:
        assert read_all([0, 1], 4, train=False) == [[[0]], [[1]], [], []]

    def test_evaluation_has_its_own_batch_size(self) -> None:
        assert [len(batch) for batch in read(feed_of(list(range(20)), 0, 2, train=False, val_batch_size=7))] == [7, 3]

    def test_skipped_batches_are_not_read(self) -> None:
        class Recorder(list[int]):
            def __getitem__(self, index: Any) -> Any:
                asked.append(index)
                return super().__getitem__(index)

        asked: list[int] = []
        feed = feed_of(Recorder(range(24)), 1, 2)
        whole = read(feed, epoch=2)
        asked.clear()
        assert read(feed, epoch=2, skip_batches=2) == whole[2:]
        assert asked == samples(whole[2:])
        assert feed.batches_per_epoch == 3
        assert read(feed, epoch=2) == whole

    def test_the_dataset_reads_whole_batches_where_it_can(self) -> None:
        class Columns(list[int]):
            def __getitems__(self, keys: list[int]) -> list[int]:
                return [100 + key for key in keys]

        assert read(feed_of(Columns(range(4)), 0, 2, shuffle=False)) == [[100, 102]]


class TestRefusals:
    @pytest.mark.parametrize("train", [True, False])
    def test_an_empty_dataset(self, train: bool) -> None:
        with pytest.raises(DataError, match=r"dataset list is empty \(0 samples\)"):
            feed_of([], 0, 1, train=train)

    @pytest.mark.parametrize("rank", [0, 3])
    def test_fewer_samples_than_ranks(self, rank: int) -> None:
        with pytest.raises(DataError, match="training dataset list gives 3 samples for 4 ranks"):
            feed_of([0, 1, 2], rank, 4)

    @pytest.mark.parametrize("drop_last", [True, False])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_no_whole_batch_for_the_smallest_share_is_refused_on_every_rank(self, rank: int, drop_last: bool) -> None:
        loader = loader_of(list(range(15)), batch_size=8, shuffle=True, drop_last=True)
        with pytest.raises(DataError, match=r"batches of 8, but only 7 samples for each of the 2 ranks"):
            feed_of(loader, rank, 2, drop_last=drop_last)

    def test_data_that_is_no_dataset(self) -> None:
        with pytest.raises(DataError, match="training data is a generator: allowed are"):
            feed_of((number for number in range(3)), 0, 1)

    def test_a_loader_that_iterates_in_its_own_way(self) -> None:
        data: Any = [1, 2]

        class Prefetcher(DataLoader[Any]):
            def __iter__(self) -> Any:
                return iter([])

        with pytest.raises(DataError, match="Prefetcher iterates in its own way"):
            feed_of(Prefetcher(data), 0, 1)

    def test_a_rank_beyond_the_world(self) -> None:
        with pytest.raises(UsageError, match="rank 2 is not below world_size 2"):
            feed_of([1, 2], 2, 2)

    def test_a_feed_of_a_loader_that_was_not_split(self) -> None:
        with pytest.raises(UsageError, match="made by build_loader"):
            Feed(loader_of([1, 2]), CPU)

    def test_shuffle_beside_a_sampler_is_refused_by_torch_itself(self) -> None:
        with pytest.raises(ValueError, match="mutually exclusive with shuffle"):
            loader_of([1, 2], shuffle=True, sampler=RandomSampler([1, 2]))


class TestGivenLoaders:
    def test_a_plain_loader_is_split_in_order(self) -> None:
        loader = loader_of(list(range(10)), batch_size=2)
        assert read_all(loader, 2) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]

    def test_a_shuffled_loader_is_shuffled_anew_each_epoch(self) -> None:
        loader = loader_of(list(range(24)), batch_size=3, shuffle=True)
        shares = [[samples(batches) for batches in read_all(loader, 2, epoch)] for epoch in (0, 1)]
        assert sorted(samples(shares[0])) == sorted(samples(shares[1])) == list(range(24))
        assert shares[0] != shares[1]

    def test_its_own_drop_last_drops_small_batches_in_training_only(self) -> None:
        loader = loader_of(list(range(14)), batch_size=3, drop_last=True)
        assert [len(batch) for batch in read(feed_of(loader, 1, 2))] == [3, 3]
        assert [len(batch) for batch in read(feed_of(loader, 1, 2, train=False))] == [3, 3, 1]

    def test_its_collate_function_is_kept(self) -> None:
        loader = loader_of(list(range(4)), batch_size=2, collate_fn=lambda batch: torch.tensor(batch) * 10)
        assert read(feed_of(loader, 1, 2)) == [[10, 30]]

    def test_a_loader_without_batching_is_split_by_key(self) -> None:
        loader = loader_of([torch.arange(n) for n in range(1, 5)], batch_size=None)
        feed = feed_of(loader, 1, 2)
        assert read(feed) == [[0, 1], [0, 1, 2, 3]]
        assert feed.batch_size is None

    @pytest.mark.parametrize("drop_last", [True, False])
    def test_h65_a_distributed_sampler_seeded_by_rank_still_covers_the_set_once(self, drop_last: bool) -> None:
        data = list(range(20))
        shares = [
            samples(read(feed_of(loader_of(data, batch_size=4, sampler=sampler), rank, 2)))
            for rank in (0, 1)
            if (sampler := sampler_of(data, 2, rank, seed=rank, drop_last=drop_last))
        ]
        assert sorted(samples(shares)) == data

    def test_h65_so_does_a_subclass_of_it(self) -> None:
        class Own(DistributedSampler[int]):
            pass

        data: Any = list(range(20))
        shares = [
            samples(read(feed_of(loader_of(data, batch_size=4, sampler=Own(data, 2, rank, seed=rank)), rank, 2)))
            for rank in (0, 1)
        ]
        assert sorted(samples(shares)) == data

    def test_a_distributed_sampler_does_not_pad_an_evaluation(self) -> None:
        data = list(range(5))
        shares = [
            samples(read(feed_of(loader_of(data, sampler=sampler_of(data, 2, rank)), rank, 2, train=False)))
            for rank in (0, 1)
        ]
        assert shares == [[0, 2, 4], [1, 3]]

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_a_sampler_made_for_another_rank_is_refused(self, wrapped: bool) -> None:
        sampler = sampler_of(list(range(8)), 4, 0)
        batches = BatchSampler(sampler, 2, False)
        loader = loader_of(list(range(8)), batch_sampler=batches) if wrapped else loader_of(range(8), sampler=sampler)
        with pytest.raises(DataError, match=r"DistributedSampler was made for rank 0 of 4.*num_replicas=2, rank=1"):
            feed_of(loader, 1, 2)

    def test_h68_whole_batches_of_a_hand_made_batch_sampler_take_turns(self) -> None:
        loader = loader_of(list(range(11)), batch_sampler=Buckets(11, 3))
        assert read(feed_of(loader, 0, 1)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
        assert read_all(loader, 2) == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10]]]

    def test_h68_a_shuffled_one_too_each_batch_once_in_a_new_order_each_epoch(self) -> None:
        buckets = Buckets(40, 4, shuffle=True)
        loader = loader_of(list(range(40)), batch_sampler=buckets)
        epochs = []
        for epoch in (0, 1):
            shares = []
            for rank in range(4):
                torch.manual_seed(rank)  # ranks' global generators differ: that must not matter
                shares.append(read(feed_of(loader, rank, 4), epoch))
            assert sorted(batch for share in shares for batch in share) == buckets.buckets
            epochs.append(shares)
        assert epochs[0] != epochs[1]

    def test_h68_a_batch_sampler_over_a_distributed_sampler_is_not_split_twice(self) -> None:
        class Grouped(Sampler[list[int]]):
            def __init__(self, sampler: DistributedSampler[int]) -> None:
                self.sampler, self.batch_size = sampler, 3

            def __iter__(self) -> Iterator[list[int]]:
                return iter(BatchSampler(self.sampler, 3, False))

        data = list(range(12))
        feeds = [feed_of(loader_of(data, batch_sampler=Grouped(sampler_of(data, 2, rank))), rank, 2) for rank in (0, 1)]
        epochs = [[read(feed, epoch) for feed in feeds] for epoch in (0, 1)]
        assert [sorted(samples([samples(share) for share in shares])) for shares in epochs] == [data, data]
        assert epochs[0] != epochs[1], "set_epoch must reach the sampler inside"
        assert (feeds[0].batch_size, feeds[0].batches_per_epoch) == (3, None)

    @pytest.mark.parametrize(
        ("make", "expected"),
        [(lambda: SubsetRandomSampler(range(3, 13)), 5), (lambda: WeightedRandomSampler([1.0] * 20, 10), 5)],
    )
    def test_h68_samplers_that_know_no_ranks_take_turns(self, make: Any, expected: int) -> None:
        def shares(epoch: int) -> list[list[int]]:
            loader = loader_of(list(range(20)), batch_size=2, sampler=make())
            return [samples(batches) for batches in read_all(loader, 2, epoch)]

        def alone(epoch: int) -> list[int]:
            loader = loader_of(list(range(20)), batch_size=2, sampler=make())
            return samples(read(feed_of(loader, 0, 1), epoch))

        for epoch in (0, 1):
            even, odd = shares(epoch)
            assert len(even) == len(odd) == expected
            assert [sample for pair in zip(even, odd, strict=True) for sample in pair] == alone(epoch)
        assert alone(0) != alone(1)

    def test_the_digest_tells_an_order_that_differs_between_ranks(self) -> None:
        def digest(sampler_seed: int, rank: int) -> int | None:
            generator = torch.Generator().manual_seed(sampler_seed)
            sampler = SubsetRandomSampler(range(20), generator=generator)
            feed = feed_of(loader_of(list(range(20)), sampler=sampler), rank, 2)
            feed.begin_epoch(0)
            return feed.order_digest

        assert digest(7, rank=0) == digest(7, rank=1)
        assert digest(0, rank=0) != digest(1, rank=1)

    def test_there_is_no_digest_where_safetrain_makes_the_order(self) -> None:
        feed = feed_of(list(range(8)), 0, 2)
        feed.begin_epoch(0)
        assert feed.order_digest is None

    def test_fewer_batches_than_ranks_are_refused(self) -> None:
        loader = loader_of(list(range(9)), batch_sampler=Buckets(9, 3))
        with pytest.raises(DataError, match="training loader's Buckets gives 3 batches for 4 ranks"):
            feed_of(loader, 0, 4)

    def test_rank_0_is_told_that_ranks_take_turns(self, caplog: pytest.LogCaptureFixture) -> None:
        loader = loader_of(list(range(9)), batch_sampler=Buckets(9, 3))
        with caplog.at_level(logging.WARNING):
            feed_of(loader, 1, 2)
            assert not caplog.records
            feed_of(loader, 0, 2)
        assert "Buckets knows nothing of ranks: the 2 ranks take turns over its batches" in caplog.text

    def test_an_endless_sampler_works(self) -> None:
        class Endless(Sampler[list[int]]):
            def __iter__(self) -> Iterator[list[int]]:
                while True:
                    yield [0, 1]
                    yield [2, 3]

        feed = feed_of(loader_of(list(range(4)), batch_sampler=Endless()), 1, 2)
        feed.begin_epoch(0)
        assert [feed.take().batch.tolist() for _ in range(600)] == [[2, 3]] * 600
        assert feed.batches_per_epoch is None
