"""Who reads what: shares are disjoint, complete and reordered each epoch; what cannot be shared is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from safetrain.data import Feed
from safetrain.errors import DataError, UsageError
from safetrain.shares import MapShare, TensorShare
from tests.unit.reading import CPU, feed_of, loader_of, read, read_all, sampler_of, samples


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


class TestTensorDatasets:
    """They are read a batch at a time, and nobody can tell."""

    DATA = TensorDataset(torch.randn(23, 4, 2), torch.arange(23), torch.zeros(23, 0, dtype=torch.bool))

    @pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_the_batches_are_those_of_a_plain_loader(self, workers: int) -> None:
        sampler = sampler_of(self.DATA, 2, 1, seed=0, drop_last=True)
        sampler.set_epoch(3)
        feed = feed_of(self.DATA, 1, 2, batch_size=5, num_workers=workers)
        assert type(feed._loader.dataset) is TensorShare
        feed.begin_epoch(3)
        for expected in DataLoader(self.DATA, batch_size=5, sampler=sampler):
            batch = feed.take().batch
            assert type(batch) is list
            for ours, theirs in zip(batch, expected, strict=True):
                assert torch.equal(ours, theirs)
                assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert feed.take().empty

    @pytest.mark.parametrize(
        "loader",
        [
            DataLoader(TensorDataset(torch.randn(8, 6)[:, ::2]), 2),  # its samples don't lie one behind the other
            DataLoader(type("Mine", (TensorDataset,), {})(torch.randn(8, 3)), 2),
            DataLoader(DATA, 2, collate_fn=list),
            DataLoader(DATA, None),
        ],
    )
    def test_what_differs_is_read_as_it_was(self, loader: Any) -> None:
        assert not TensorShare.fits(loader)
        assert type(feed_of(loader, 0, 1)._loader.dataset) is MapShare

    def test_keys_of_a_users_sampler_are_the_datasets_to_understand(self) -> None:
        feed = feed_of(loader_of(self.DATA, batch_sampler=[[slice(0, 2), slice(4, 6)]]), 0, 1)
        feed.begin_epoch(0)
        assert torch.equal(feed.take().batch[1], torch.tensor([[0, 1], [4, 5]]))


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
