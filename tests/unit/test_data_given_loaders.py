"""A user's own DataLoader: its order is kept, foreign samplers are split over ranks or refused with the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from safetrain.errors import DataError
from tests.unit.reading import Buckets, feed_of, loader_of, read, read_all, sampler_of, samples


class TestGivenLoaders:
    def test_a_plain_loader_is_split_in_order(self) -> None:
        loader = loader_of(list(range(10)), batch_size=2)
        assert read_all(loader, 2) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]

    def test_options_that_have_no_effect_on_it_are_named_once(self, caplog: pytest.LogCaptureFixture) -> None:
        loader = loader_of(list(range(10)), batch_size=2)
        for rank in (0, 1):
            feed_of(loader, rank, 2, batch_size=64, num_workers=3, drop_last=False)
        assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["loader.batch_size"]
        assert "loader.batch_size, loader.num_workers: no effect" in caplog.text
        caplog.clear()
        feed_of(list(range(10)), 0, 2, batch_size=4)
        assert not caplog.records

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
