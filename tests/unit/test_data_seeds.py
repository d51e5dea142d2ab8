"""Random numbers of loader workers, streams and samplers: different where they must be, the same on a rerun."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from safetrain.config import Loader
from safetrain.data import Feed, build_loader
from safetrain.seeding import GeneratorNotes, OwnRandom, derive_seed, generator_states, seed_generators, seed_process
from safetrain.testing import differences

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

Draw = tuple[float, float, float]


def draw() -> Draw:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def as_given(batch: Any) -> Any:
    return batch


class Augmented(Dataset[Any]):
    """Gives (index, worker, three random numbers)."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int, Draw]:
        info = get_worker_info()
        return index, info.id if info else 0, draw()


class ShuffledStream(IterableDataset[Any]):
    """Shuffles itself with the global generator, as streams do, and augments on the way."""

    def __iter__(self) -> Iterator[tuple[int, Draw]]:
        order = list(range(23))
        random.shuffle(order)
        for sample in order:
            yield sample, draw()


def read(
    data: Dataset[Any],
    rank: int,
    world_size: int,
    *,
    workers: int,
    epochs: tuple[int, ...] = (0,),
    seed: int = 0,
    skip_batches: int = 0,
    collate: Callable[[Any], Any] = as_given,
    keep_workers: bool = True,
) -> list[list[Any]]:
    """The batches of each epoch."""
    keep = keep_workers and workers > 0
    given = DataLoader(data, batch_size=2, num_workers=workers, collate_fn=collate, persistent_workers=keep)
    feed = Feed(
        build_loader(given, Loader(), rank=rank, world_size=world_size, seed=seed, train=True), torch.device("cpu")
    )
    batches: list[list[Any]] = []
    for epoch in epochs:
        batches.append([])
        feed.begin_epoch(epoch, skip_batches)
        while not (fetched := feed.take()).empty:
            assert fetched.error is None
            batches[-1].append(fetched.batch)
    return batches


def first_draws(epoch_batches: list[list[Any]]) -> list[Draw]:
    """The first draw of each worker in the order of the workers."""
    first: dict[int, Draw] = {}
    for batch in epoch_batches:
        for _, worker, numbers in batch:
            first.setdefault(worker, numbers)
    return [first[worker] for worker in sorted(first)]


@pytest.mark.parametrize("keep_workers", [True, False])
def test_h69_two_ranks_with_two_workers_draw_differently_and_the_same_on_a_rerun(keep_workers: bool) -> None:
    def run() -> list[Draw]:
        epochs = [
            epoch for rank in (0, 1)
            for epoch in read(Augmented(), rank, 2, workers=2, epochs=(0, 1), keep_workers=keep_workers)
        ]  # fmt: skip
        return [numbers for epoch in epochs for numbers in first_draws(epoch)]

    draws = run()
    assert len(draws) == 2 * 2 * 2  # ranks, workers, epochs
    for kind in range(3):  # random, numpy, torch
        assert len({numbers[kind] for numbers in draws}) == len(draws)
    assert run() == draws


def test_h69_without_workers_ranks_differ_because_their_processes_do() -> None:
    def run(rank: int) -> list[Any]:
        seed_process(0, rank)
        return [numbers for [epoch] in [read(Augmented(), rank, 2, workers=0)] for b in epoch for _, _, numbers in b]

    assert not set(run(0)) & set(run(1))
    assert run(1) == run(1)
    assert len(set(run(1))) == 8, "seeded once, not per batch"


def test_what_a_batch_draws_depends_neither_on_the_number_of_workers_nor_on_where_an_epoch_was_resumed() -> None:
    def numbers(batches: list[Any]) -> list[Any]:
        return [(index, drawn) for batch in batches for index, _, drawn in batch]

    [whole] = read(Augmented(), 1, 2, workers=1, epochs=(3,))
    [by_two] = read(Augmented(), 1, 2, workers=2, epochs=(3,))
    [resumed] = read(Augmented(), 1, 2, workers=2, epochs=(3,), skip_batches=1)
    assert numbers(by_two) == numbers(whole)
    assert numbers(resumed) == numbers(whole)[2:]


def test_the_jobs_seed_matters() -> None:
    assert read(Augmented(), 0, 1, workers=1, seed=1) != read(Augmented(), 0, 1, workers=1, seed=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_does_not_touch_the_generators_that_the_model_draws_from(workers: int) -> None:
    seed_generators(5)
    expected = draw()
    seed_generators(5)
    read(ShuffledStream(), 0, 2, workers=workers)
    assert draw() == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_stream_that_shuffles_itself_gives_each_sample_once_as_it_does_to_one_process(
    workers: int, world_size: int
) -> None:
    def run(world_size: int, workers: int) -> list[list[Any]]:
        epochs: list[list[Any]] = [[], []]
        for rank in range(world_size):
            seed_process(0, rank)
            given = read(ShuffledStream(), rank, world_size, workers=workers, epochs=(0, 1))
            for samples, batches in zip(epochs, given, strict=True):
                samples += [sample for batch in batches for sample in batch]
        return epochs

    alone, spread = run(1, 0), run(world_size, workers)
    assert [sorted(samples) for samples in spread] == [sorted(samples) for samples in alone]
    assert [index for index, _ in sorted(spread[0])] == list(range(23))
    assert alone[0] != alone[1]


def test_collating_a_stream_draws_differently_in_each_rank_and_worker() -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    def collate(batch: list[int]) -> Draw:
        return draw()

    def run() -> list[Draw]:
        return [
            numbers for rank in (0, 1)
            for epoch in read(Plain(), rank, 2, workers=2, epochs=(0, 1), collate=collate) for numbers in epoch
        ]  # fmt: skip

    assert len(set(run())) == len(run()) == 2 * 2 * 2
    assert run() == run()


class TestOwnRandom:
    def test_inside_goes_on_outside_notices_nothing(self) -> None:
        def many() -> list[Any]:
            return [draw(), float(np.random.normal()), float(torch.randn(())), random.gauss(0, 1)]  # cached halves, too

        seed_generators(3)
        inside = [many(), many()]
        seed_generators(4)
        outside = [many(), many()]

        seed_generators(4)
        own = OwnRandom(3)
        first = many()
        with own:
            assert many() == inside[0]
        second = many()
        with own:
            assert many() == inside[1]
        assert [first, second] == outside

    def test_an_error_inside_leaves_the_outside_as_it_was(self) -> None:
        seed_generators(4)
        expected = draw()
        seed_generators(4)
        with pytest.raises(KeyError), OwnRandom(3):
            raise KeyError(draw())
        assert draw() == expected


class TestDeriveSeed:
    def test_a_known_value(self) -> None:
        assert derive_seed(0, "batch", 1, 2, 3) == 3401158305510425629  # the same in every process, Python and release
        assert 0 <= derive_seed(2**80, "x") < 2**63

    def test_neighbours_are_unrelated(self) -> None:
        seeds = {
            derive_seed(seed, word, a, b) for seed in range(3) for word in "xy" for a in range(12) for b in range(12)
        }
        assert len(seeds) == 3 * 2 * 12 * 12
        assert derive_seed(1, 23) != derive_seed(12, 3)


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "random's normal numbers": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, a normal number": np.random.randn,  # the second of a pair is drawn with the first, and kept
    "numpy, a whole state": lambda: np.random.randint(2, size=624),
    "torch": lambda: torch.rand(()),
    "torch's dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("before", DRAWS)
@pytest.mark.parametrize("what", DRAWS)
def test_a_note_holds_where_every_generator_was(before: str, what: str) -> None:
    notes = GeneratorNotes(torch.device("cpu"))
    notes.take()
    DRAWS[before]()
    expected, note = generator_states(), notes.take()
    DRAWS[what]()
    notes.take()
    assert not differences(note.states(), expected)
    drawn = draw(), np.random.randn()
    note.restore(torch.device("cpu"))
    assert not differences(generator_states(), expected)
    DRAWS[what]()
    assert (draw(), np.random.randn()) == drawn
