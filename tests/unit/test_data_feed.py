"""The feed and streams: errors come as values, the epoch reaches the process that reads."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from safetrain.config import Loader
from safetrain.data import Feed, build_loader
from safetrain.errors import SkipBatch, UsageError
from safetrain.work import Work

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

CPU = torch.device("cpu")


def feed_of(data: Any, rank: int = 0, world_size: int = 1, *, train: bool = True, **options: Any) -> Feed:
    options = {"batch_size": 2, "shuffle": False} | options
    return Feed(build_loader(data, Loader(**options), rank=rank, world_size=world_size, seed=0, train=train), CPU)


def rest(feed: Feed) -> list[Any]:
    """What is left of the epoch: batches as lists, errors as they are."""
    given = []
    while not (fetched := feed.take()).empty:
        given.append(fetched.error or fetched.batch.tolist())
    return given


class Broken(Dataset[int]):
    """Raises ``error`` for the sample 3 of 8."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.error
        return index


class Counting(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class TestFeed:
    def test_a_batch_comes_with_its_samples(self) -> None:
        feed = feed_of(list(range(5)))
        feed.begin_epoch(0)
        assert [feed.take().samples for _ in range(4)] == [2, 2, 1, None]
        assert (feed.batch_size, feed.batches_per_epoch) == (2, 3)

    def test_looking_ahead_keeps_the_batch(self) -> None:
        feed = feed_of(list(range(3)))
        feed.begin_epoch(0)
        assert feed.look_ahead()
        assert feed.look_ahead()
        assert feed.take().batch.tolist() == [0, 1]
        assert feed.look_ahead()
        assert feed.take().batch.tolist() == [2]
        assert not feed.look_ahead()
        assert feed.take().empty
        assert feed.take().empty

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("error", [ValueError("bad picture"), SkipBatch("too dark")])
    def test_an_error_of_the_dataset_is_a_value_with_its_place_and_the_epoch_goes_on(
        self, workers: int, error: Exception
    ) -> None:
        feed = feed_of(Broken(error), num_workers=workers)
        feed.begin_epoch(0)
        assert feed.take().batch.tolist() == [0, 1]
        assert feed.look_ahead(), "an error ahead is not the end of the epoch"
        fetched = feed.take()
        assert (fetched.batch, fetched.samples, fetched.empty) == (None, None, False)
        assert type(fetched.error) is type(error)
        assert str(error) in str(fetched.error)
        if workers:
            assert f'File "{__file__}"' in str(fetched.error)
        else:
            assert fetched.error is error
        assert rest(feed) == [[4, 5], [6, 7]]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_stop_iteration_in_a_dataset_does_not_end_the_epoch(self, workers: int) -> None:
        feed = feed_of(Broken(StopIteration()), num_workers=workers)
        feed.begin_epoch(0)
        first, failed, *after = rest(feed)
        assert (first, after) == ([0, 1], [[4, 5], [6, 7]])
        assert "Broken.__getitem__ raised StopIteration" in str(failed)

    def test_an_error_at_the_start_of_an_epoch_is_the_next_batchs(self) -> None:
        class Lost(list[int]):
            def set_epoch(self, epoch: int) -> None:
                raise FileNotFoundError(f"no list for epoch {epoch}")

        feed = feed_of(Lost(range(4)))
        feed.begin_epoch(3)
        assert feed.look_ahead()
        assert str(feed.take().error) == "no list for epoch 3"
        assert feed.take().empty

    def test_a_batch_that_cannot_be_moved_is_an_error(self) -> None:
        class Stuck:
            def to(self, device: torch.device) -> None:
                raise MemoryError(f"no room on {device}")

        data: Any = [0, 1]
        loader = DataLoader(data, collate_fn=lambda batch: Stuck())
        feed = feed_of(loader)
        feed.begin_epoch(0)
        assert isinstance(feed.take().error, MemoryError)

    def test_a_batch_before_the_first_epoch_is_refused(self) -> None:
        with pytest.raises(UsageError, match="begin_epoch"):
            feed_of([1, 2]).take()

    def test_an_error_does_not_keep_loader_workers_waiting_at_the_end(self) -> None:
        feed = feed_of(Broken(ValueError()), num_workers=1, persistent_workers=False)
        feed.begin_epoch(0)
        feed.take()
        error = feed.take().error
        assert error is not None
        gone = weakref.ref(feed._batches)
        del feed
        assert gone() is None, "the error holds torch's iterator, which takes 5 s a worker to end as part of a cycle"

    @pytest.mark.parametrize("workers", [0, 1])
    def test_an_epoch_left_early_leaves_nothing_to_the_next(self, workers: int) -> None:
        feed = feed_of(list(range(12)), num_workers=workers)
        feed.begin_epoch(0)
        feed.take()
        feed.look_ahead()
        feed.begin_epoch(1)
        assert rest(feed) == [[start, start + 1] for start in range(0, 12, 2)]

    @pytest.mark.parametrize(("workers", "keep"), [(0, False), (2, True), (2, False)])
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_dataset_knows_the_epoch_where_it_is_read(self, workers: int, keep: bool, stream: bool) -> None:
        class Mapped(Dataset[int]):
            epoch = -1

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __len__(self) -> int:
                return 4

            def __getitem__(self, index: int) -> int:
                return self.epoch

        class Streamed(IterableDataset[int]):
            epoch = -1
            set_epoch = Mapped.set_epoch

            def __iter__(self) -> Iterator[int]:
                return iter([self.epoch] * 4)

        feed = feed_of(Streamed() if stream else Mapped(), num_workers=workers, persistent_workers=keep)
        for epoch in (0, 5, 2):
            feed.begin_epoch(epoch)
            assert rest(feed) == [[epoch, epoch]] * 2


class TestStreams:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("world_size", [1, 2, 4])
    @pytest.mark.parametrize("train", [True, False])
    def test_each_sample_comes_once_over_ranks_and_workers(self, workers: int, world_size: int, train: bool) -> None:
        given = []
        for rank in range(world_size):
            feed = feed_of(Counting(25), rank, world_size, num_workers=workers, train=train)
            for _ in range(2):
                feed.begin_epoch(0)
                shares = [sample for batch in rest(feed) for sample in batch]
            given.append(shares)
        assert sorted(sample for share in given for sample in share) == list(range(25))
        lengths = [len(share) for share in given]
        assert max(lengths) - min(lengths) <= max(1, workers)

    def test_the_shares_of_two_ranks_with_two_workers(self) -> None:
        for rank, expected in ((0, [[0, 4], [2, 6]]), (1, [[1, 5], [3, 7]])):
            feed = feed_of(Counting(8), rank, 2, num_workers=2)
            feed.begin_epoch(0)
            assert rest(feed) == expected

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_stream_that_shards_itself_is_told_its_shard_and_read_whole(self, workers: int) -> None:
        class Files(IterableDataset[list[int]]):
            def set_shard(self, shard: int, shards: int) -> None:
                self.files = range(8)[shard::shards]

            def __iter__(self) -> Iterator[Any]:
                return iter(self.files)

        shares = []
        for rank in (0, 1):
            feed = feed_of(Files(), rank, 2, num_workers=workers)
            feed.begin_epoch(0)
            shares += [sample for batch in rest(feed) for sample in batch]
        assert sorted(shares) == list(range(8))

    def test_skipped_batches_are_read_through(self) -> None:
        feed = feed_of(Counting(20), 1, 2)
        feed.begin_epoch(0, skip_batches=3)
        assert rest(feed) == [[13, 15], [17, 19]]
        feed.begin_epoch(0, skip_batches=9)
        assert not feed.look_ahead()
        assert feed.batches_per_epoch is None

    def test_a_stream_goes_on_after_an_error(self) -> None:
        class Numbers(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return map(self.check, range(8))

            def check(self, sample: int) -> int:
                if sample == 2:
                    raise SkipBatch(f"sample {sample}")
                return sample

        feed = feed_of(Numbers())
        feed.begin_epoch(0)
        first, error, *after = rest(feed)
        assert (first, str(error), after) == ([0, 1], "sample 2", [[3, 4], [5, 6], [7]])

    @pytest.mark.parametrize(("train", "expected"), [(True, [[0, 1]]), (False, [[0, 1], [2]])])
    def test_its_loaders_drop_last_counts_in_training_only(self, train: bool, expected: list[list[int]]) -> None:
        feed = feed_of(DataLoader(Counting(3), batch_size=2, drop_last=True), train=train)
        feed.begin_epoch(0)
        assert rest(feed) == expected

    def test_a_stream_of_batches_is_not_batched_again(self) -> None:
        class Batches(IterableDataset[torch.Tensor]):
            def __iter__(self) -> Iterator[torch.Tensor]:
                return (torch.full((3,), number) for number in range(4))

        feed = feed_of(DataLoader(Batches(), batch_size=None), 1, 2)
        feed.begin_epoch(0)
        assert rest(feed) == [[1, 1, 1], [3, 3, 3]]


class TestWhichSamples:
    """A failure names the samples that were at hand."""

    @pytest.mark.parametrize("workers", [0, 2])
    def test_each_batch_of_a_rank_with_its_place(self, workers: int) -> None:
        feed = feed_of(list(range(12)), 1, 2, num_workers=workers)
        for epoch in range(2):
            feed.begin_epoch(epoch)
            taken = []
            while not (fetched := feed.take()).empty:
                assert fetched.work is not None
                taken.append((fetched.work.number, fetched.work.samples))
                assert fetched.batch.tolist() == fetched.work.samples
            assert taken == [(0, [1, 3]), (1, [5, 7]), (2, [9, 11])]
        assert fetched.work is None
        feed.begin_epoch(2, skip_batches=2)
        work = feed.take().work
        assert work is not None
        assert work.in_words() == "samples 9, 11 of the dataset (batch 3 of epoch 3)"

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_batch_that_could_not_be_read_and_the_sample_in_it(self, workers: int) -> None:
        feed = feed_of(Broken(ValueError("torn file")), num_workers=workers)
        feed.begin_epoch(0)
        given = [feed.take() for _ in range(4)]
        assert [fetched.work.samples for fetched in given if fetched.work] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        error = given[1].error
        assert error is not None
        assert "(the dataset was asked for 3)" in "".join(traceback.format_exception(error))

    def test_a_dataset_that_makes_its_own_batches_or_has_other_keys(self) -> None:
        feed = feed_of(DataLoader(list(range(4)), batch_size=None), 1, 2)
        feed.begin_epoch(0)
        assert [fetched.work.in_words() for fetched in (feed.take(), feed.take()) if fetched.work] == [
            "sample 1 of the dataset (batch 1 of epoch 1)",
            "sample 3 of the dataset (batch 2 of epoch 1)",
        ]
        assert Work(0, 0, [("a", 1), torch.tensor(5)]).samples == ["('a', 1)", 5]
        many = Work(0, 6, list(range(32))).in_words()
        assert many == "samples 0, 1, 2, 3, 4, 5, 6, 7 and 24 more of the dataset (batch 7 of epoch 1)"

    @pytest.mark.parametrize(
        ("workers", "words"),
        [(0, "samples 2 to 3 of its part of the stream (batch 2 of epoch 2)"),
         (2, "batch 2 of epoch 2 of its part of the stream")],
    )  # fmt: skip
    def test_of_a_stream_how_far_it_was(self, workers: int, words: str) -> None:
        feed = feed_of(Counting(20), 1, 2, num_workers=workers)
        feed.begin_epoch(1)
        feed.take()
        work = feed.take().work
        assert work is not None
        assert (work.in_words(), work.samples) == (words, [])
