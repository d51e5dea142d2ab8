"""A feed that goes on inside an epoch: the same batches on the same ranks, each sample once on others."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from safetrain.config import Loader
from safetrain.data import Feed, build_loader
from safetrain.data_state import FeedState
from safetrain.errors import CheckpointError
from safetrain.legs import left_of
from safetrain.seeding import seed_generators

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


class Drawn(Dataset[Any]):
    """A number, and what was drawn for it."""

    def __init__(self, count: int = 30) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = 30) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([(index, float(torch.rand(()))) for index in range(self.count)])


class OwnShards(Stream):
    def set_shard(self, shard: int, shards: int) -> None:
        self.shard, self.shards = shard, shards

    def __iter__(self) -> Iterator[Any]:
        return iter([(index, 0.0) for index in range(self.shard, self.count, self.shards)])


def weighted(dataset: Any) -> DataLoader[Any]:
    """A sampler whose generator goes on from epoch to epoch."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(dataset, batch_size=3, sampler=WeightedRandomSampler([1.0] * 30, 30, generator=generator))


def feed_of(data: Any, rank: int, world_size: int, *, seed: int = 0, **options: Any) -> Feed:
    options = {"batch_size": 3} | options
    loader = build_loader(data, Loader(**options), rank=rank, world_size=world_size, seed=seed, train=True)
    return Feed(loader, torch.device("cpu"))


def part_of(feed: Feed, rank: int, *, inside: bool = True) -> FeedState:
    return FeedState(feed, rank, lambda: inside)


def written(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def take(feed: Feed, batches: int = 1000) -> list[Any]:
    """As the loop does it: the next batch is fetched ahead before this one is done."""
    taken = []
    for _ in range(batches):
        if (fetched := feed.take()).empty:
            break
        assert fetched.error is None
        feed.look_ahead()
        taken.append([each.tolist() for each in fetched.batch])
    return taken


def numbers(batches: Sequence[Any]) -> list[int]:
    return [number for batch in batches for number in batch[0]]


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize(
    "data",
    [
        (Drawn, {}),
        (Drawn, {"num_workers": 2}),
        (Drawn, {"num_workers": 2, "persistent_workers": False}),
        (Drawn, {"drop_last": False}),
        (lambda: weighted(Drawn()), {}),
        (lambda: DataLoader(Drawn(), batch_size=3, sampler=SubsetRandomSampler(range(3, 27))), {}),
        (Stream, {}),
        (Stream, {"num_workers": 2}),
        (OwnShards, {}),
    ],
    ids=[
        "map",
        "workers",
        "new_workers",
        "every_sample",
        "own_generator",
        "subset",
        "stream",
        "stream_workers",
        "shards",
    ],
)
def test_the_same_rank_goes_on_with_the_same_batches(
    data: tuple[Callable[[], Any], dict[str, Any]], epoch: int
) -> None:
    make, options = data
    seed_generators(1)
    feed = feed_of(make(), 1, 2, **options)
    for number in range(epoch):
        feed.begin_epoch(number)
        take(feed)
    feed.begin_epoch(epoch)
    feed.remembers = True
    take(feed, 2)
    saved = written(part_of(feed, 1).state_dict())
    outside = torch.get_rng_state()
    expected = take(feed)
    feed.begin_epoch(epoch + 1)
    expected += take(feed)

    seed_generators(2)
    resumed = feed_of(make(), 1, 2, **options)
    part_of(resumed, 1).load_state_dicts([{}, saved], 2)
    torch.set_rng_state(outside)
    resumed.begin_epoch(epoch)
    assert torch.equal(torch.get_rng_state(), outside)  # the batch ahead was drawn before
    found = take(resumed)
    resumed.begin_epoch(epoch + 1)
    found += take(resumed)
    assert found == expected
    assert len(found) > 5


def test_between_two_epochs_samplers_go_on_where_they_were() -> None:
    def epoch(feed: Feed, number: int) -> list[int]:
        feed.begin_epoch(number)
        return numbers(take(feed))

    feed = feed_of(weighted(Drawn()), 0, 1)
    first = epoch(feed, 0)
    saved = written(part_of(feed, 0, inside=False).state_dict())
    second = epoch(feed, 1)
    assert first != second
    resumed = feed_of(weighted(Drawn()), 0, 1)
    part_of(resumed, 0).load_state_dicts([saved], 1)
    assert epoch(resumed, 1) == second


def cut(feeds: Sequence[Feed], batches: int) -> tuple[list[int], list[Any]]:
    """What the ranks take in so many windows, and their states then."""
    taken = [number for feed in feeds for number in numbers(take(feed, batches))]
    return taken, [written(part_of(feed, rank).state_dict()) for rank, feed in enumerate(feeds)]


def resumed(make: Callable[[], Any], world_size: int, states: Sequence[Any], **options: Any) -> list[Feed]:
    feeds = [feed_of(make(), rank, world_size, **options) for rank in range(world_size)]
    for rank, feed in enumerate(feeds):
        part_of(feed, rank).load_state_dicts(states, world_size)
        feed.begin_epoch(1)
    return feeds


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 3), (4, 2), (2, 4, 3), (3, 1, 3)])
@pytest.mark.parametrize(
    "make",
    [Drawn, Stream, lambda: DataLoader(Drawn(), batch_size=3, sampler=SubsetRandomSampler(range(30)))],
    ids=["map", "stream", "subset"],
)
def test_other_ranks_share_out_what_is_left(make: Callable[[], Any], worlds: Sequence[int]) -> None:
    options = {"drop_last": False}
    feeds = [feed_of(make(), rank, worlds[0], **options) for rank in range(worlds[0])]
    for feed in feeds:
        feed.begin_epoch(1)
    taken, states = cut(feeds, 2)
    for world_size in worlds[1:]:
        feeds = resumed(make, world_size, states, **options)
        more, states = cut(feeds, 1)
        taken += more
    rest = [number for feed in feeds for number in numbers(take(feed))]
    assert sorted(taken + rest) == list(range(30))


def test_another_batch_size_shares_out_what_is_left() -> None:
    feeds = [feed_of(Drawn(), rank, 2) for rank in range(2)]
    for feed in feeds:
        feed.begin_epoch(1)
    taken, states = cut(feeds, 3)
    feeds = resumed(Drawn, 2, states, batch_size=5)
    assert sorted(taken + [number for feed in feeds for number in numbers(take(feed))]) == list(range(30))


def test_the_next_epoch_is_whole_again() -> None:
    for make in (Drawn, Stream):
        feeds = [feed_of(make(), rank, 2) for rank in range(2)]
        for feed in feeds:
            feed.begin_epoch(1)
        _, states = cut(feeds, 2)
        [feed] = resumed(make, 1, states)
        assert len(numbers(take(feed))) == 30 - 12
        feed.begin_epoch(2)
        assert sorted(numbers(take(feed))) == list(range(30))


@pytest.mark.parametrize(
    ("make", "options", "world_size", "words"),
    [
        (Drawn, {"seed": 1}, 2, "inside epoch 1, whose order of samples came from seed = 0; here it is 1"),
        (Drawn, {"shuffle": False}, 2, "from loader.shuffle = True; here it is False"),
        (partial(Drawn, 40), {}, 2, "number of samples = 30; here it is 40"),
        (OwnShards, {}, 3, "Which samples are left can't be known where the dataset .* splits over ranks by itself"),
        (Stream, {"num_workers": 2}, 3, "several loader workers of a rank read a stream"),
    ],
)
def test_what_can_not_be_known_is_refused(
    make: Callable[[], Any], options: dict[str, Any], world_size: int, words: str
) -> None:
    before = {name: value for name, value in options.items() if name == "num_workers"}
    feeds = [feed_of(Drawn() if isinstance(make, partial) else make(), rank, 2, **before) for rank in range(2)]
    for feed in feeds:
        feed.begin_epoch(1)
    _, states = cut(feeds, 1)
    feed = feed_of(make(), 0, world_size, **options)
    with pytest.raises(CheckpointError, match=words):
        part_of(feed, 0).load_state_dicts(states, world_size)


@given(st.integers(0, 60), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=3))
def test_what_legs_leave_is_what_was_not_taken(count: int, legs: list[list[int]]) -> None:
    expected = list(range(count))
    for leg in legs:
        shares = [expected[taker :: len(leg)][:taken] for taker, taken in enumerate(leg)]
        expected = [item for item in expected if not any(item in share for share in shares)]
    assert list(left_of(iter(range(count)), legs)) == expected
