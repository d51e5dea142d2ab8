"""Who reads what: the batches of one rank, drawn from an order that all ranks share.

    what the loader has                            what a rank takes
    a plain or shuffled order, training            what DistributedSampler gives: (samples mod ranks) are left out
    the same, evaluation or ``drop_last=False``    every ranks-th sample: none twice (no padding), none left out
    a sampler with ``num_replicas`` and ``rank``   what that sampler gives, once its numbers are found right
    any other sampler of samples                   every ranks-th of its samples
    any other sampler of batches                   every ranks-th of its batches, whole

A last smaller batch is kept (the step weights it exactly) unless the user's own DataLoader has ``drop_last=True``; in
evaluation it is always kept.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from safetrain.errors import DataError
from safetrain.legs import Leg, left_of
from safetrain.seeding import OwnRandom, derive_seed
from safetrain.work import Work

_READ_AHEAD = 256  # items a rank that a foreign sampler is asked for at a time: entering its generators costs 0.1 ms

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a loader stands: this rank among ``world_size``, the job's seed, training or evaluation."""

    rank: int
    world_size: int
    seed: int
    train: bool

    @property
    def purpose(self) -> str:
        return "training" if self.train else "validation"


class Plan(Sampler[Work]):
    """The batches of one rank in one epoch, from which the first can be left out without reading them.

    Attributes:
        items_per_batch: how many of the items that ranks take turns over make a batch.
        handed_out: what the loader has been given and has not returned yet, in this order; whoever takes a batch of the
            loader takes its entry, too.
    """

    def __init__(self, batches: Iterable[Any], batch_size: int | None, items_per_batch: int = 1) -> None:
        self.batches = batches
        self.batch_size = batch_size
        self.items_per_batch = items_per_batch
        self.epoch = 0
        self.skip_batches = 0
        self.handed_out: deque[Work] = deque()

    def set_epoch(self, epoch: int, skip_batches: int = 0, legs: Sequence[Leg] = ()) -> None:
        """The next ``iter()`` is for ``epoch``, without what ``legs`` have taken and without the first batches."""
        self.epoch = epoch
        self.skip_batches = skip_batches
        self.handed_out.clear()
        for sampler in _nested(self.batches):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if isinstance(sampler, (SharedOrder, Turns)):
                sampler.legs = legs

    @property
    def shares_out(self) -> bool:
        """Whether safetrain splits the order over ranks; else a sampler of the user's does."""
        return any(isinstance(sampler, (SharedOrder, Turns)) for sampler in _nested(self.batches))

    @property
    def shuffled(self) -> bool | None:
        """Whether the order that safetrain made is a random one; None where it made none."""
        return next((part.shuffle for part in _nested(self.batches) if isinstance(part, SharedOrder)), None)

    def memory(self) -> list[Any]:
        """What samplers keep from epoch to epoch: the state of their torch.Generator, or their ``state_dict()``."""
        return [_memory(sampler) for sampler in _nested(self.batches)]

    def restore_memory(self, memory: Sequence[Any]) -> None:
        for sampler, state in zip(_nested(self.batches), memory, strict=True):
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.set_state(state)
            elif state is not None:
                sampler.load_state_dict(state)

    @property
    def shared_samples(self) -> int | None:
        """Samples in the dataset whose order safetrain made, and splits over ranks; None where it did not."""
        return next((len(part.dataset) for part in _nested(self.batches) if isinstance(part, SharedOrder)), None)  # type: ignore[arg-type]

    @property
    def order_digest(self) -> int | None:
        """Digest of the order that ranks take turns over; None where safetrain made the order itself."""
        return next((sampler.digest for sampler in _nested(self.batches) if isinstance(sampler, Turns)), None)

    def __iter__(self) -> Iterator[Work]:
        for number, keys in enumerate(self.batches):
            if number >= self.skip_batches:
                work = Work(self.epoch, number, keys)
                self.handed_out.append(work)
                yield work

    def __len__(self) -> int:
        """Batches in the whole epoch. Raises TypeError where the user's sampler has no length."""
        return len(self.batches)  # type: ignore[arg-type]


class SharedOrder(DistributedSampler[int]):
    """Rank r takes samples r, r + world_size, ... of the order that DistributedSampler makes, without its padding.

    Shares are disjoint. They are complete, too, unless ``drop_uneven`` leaves out what does not divide by the ranks.
    """

    legs: Sequence[Leg] = ()

    def __init__(self, dataset: Any, *, place: Place, shuffle: bool, drop_uneven: bool) -> None:
        super().__init__(dataset, place.world_size, place.rank, shuffle=shuffle, seed=place.seed, drop_last=drop_uneven)
        if not drop_uneven:
            self.num_samples = len(range(place.rank, len(dataset), place.world_size))

    def __iter__(self) -> Iterator[int]:
        samples = len(self.dataset)  # type: ignore[arg-type]
        order: Any = range(samples)
        if self.shuffle:
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        if self.legs:
            order = list(left_of(iter(order), self.legs))
        whole = len(order) - len(order) % self.num_replicas if self.drop_last else len(order)
        return iter(order[self.rank : whole : self.num_replicas])


class Turns(Sampler[Any]):
    """Ranks take turns over the items (samples, or whole batches) of a sampler that knows nothing of ranks.

    The sampler runs on every rank with equally seeded generators, so that all see one order. One that draws from a
    generator of its own must seed it equally on all ranks: ``digest`` of its first items tells.
    """

    def __init__(self, sampler: Iterable[Any], place: Place, *, drop_uneven: bool) -> None:
        self.sampler = sampler
        self.place = place
        self.drop_uneven = drop_uneven
        self.epoch = 0
        self.legs: Sequence[Leg] = ()
        self.digest: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.digest = None

    def __iter__(self) -> Iterator[Any]:
        rank, world_size, seed, _ = self.place
        own_random = OwnRandom(derive_seed(seed, "order", self.epoch))
        with own_random:
            items = left_of(iter(self.sampler), self.legs)
        while True:
            with own_random:
                chunk = list(islice(items, _READ_AHEAD * world_size))
            if not chunk:
                return
            if self.digest is None:
                self.digest = zlib.crc32(repr(chunk).encode())
            if self.drop_uneven:
                del chunk[len(chunk) - len(chunk) % world_size :]
            yield from chunk[rank::world_size]

    def __len__(self) -> int:
        rank, world_size, _, _ = self.place
        items = len(self.sampler)  # type: ignore[arg-type]
        return items // world_size if self.drop_uneven else len(range(rank, items, world_size))


def plan_batches(loader: DataLoader[Any], place: Place, *, drop_last: bool) -> Plan:
    """This rank's share of a map-style loader. ``drop_last``: leave out the samples that do not divide by the ranks.

    Raises:
        DataError: too few samples, or a sampler made for another rank or number of ranks.
    """
    drop_uneven = drop_last and place.train
    batches = loader.batch_sampler
    if batches is None:  # the dataset makes the batches, or none are wanted
        return Plan(_share_samples(loader, loader.sampler, place, drop_uneven), None)
    if type(batches) is BatchSampler:
        samples = _share_samples(loader, batches.sampler, place, drop_uneven)
        drop_small = batches.drop_last and place.train
        if drop_small:
            _check_one_batch(samples, batches.batch_size, place)
        return Plan(BatchSampler(samples, batches.batch_size, drop_small), batches.batch_size, batches.batch_size)
    size = getattr(batches, "batch_size", None)
    share = batches if _splits_over_ranks(batches, place) else _take_turns(batches, place, "batches", drop_uneven=False)
    return Plan(share, size if isinstance(size, int) else None)


def _share_samples(loader: DataLoader[Any], sampler: Any, place: Place, drop_uneven: bool) -> Sampler[Any]:
    knows_ranks = _splits_over_ranks(sampler, place)
    if type(sampler) is DistributedSampler:  # made anew: it may be seeded by rank, and without drop_last it pads
        return _own_sampler(sampler.dataset, sampler.shuffle, place, drop_uneven)
    if knows_ranks:
        return sampler
    permutes = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if permutes and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return _own_sampler(loader.dataset, type(sampler) is RandomSampler, place, drop_uneven)
    return _take_turns(sampler, place, "samples", drop_uneven)


def _own_sampler(dataset: Any, shuffle: bool, place: Place, drop_uneven: bool) -> SharedOrder:
    shuffle = shuffle and place.train
    if drop_uneven:
        _check_one_each(len(dataset), f"the training dataset {type(dataset).__name__}", "samples", place)
    return SharedOrder(dataset, place=place, shuffle=shuffle, drop_uneven=drop_uneven)


def _take_turns(sampler: Any, place: Place, items: str, drop_uneven: bool) -> Turns:
    name = type(sampler).__name__
    if isinstance(sampler, Sized) and place.train:
        _check_one_each(len(sampler), f"the training loader's {name}", items, place)
    if place.rank == 0 and place.world_size > 1:
        logger.warning(
            "the %s loader's %s knows nothing of ranks: the %d ranks take turns over its %s. "
            "If it does split over ranks, give it attributes num_replicas and rank.",
            place.purpose, name, place.world_size, items,
        )  # fmt: skip
    return Turns(sampler, place, drop_uneven=drop_uneven)


def _splits_over_ranks(sampler: Any, place: Place) -> bool:
    """Whether the sampler, or one inside it, splits over ranks; its seed becomes the job's, the same on all ranks."""
    for part in _nested(sampler):
        if hasattr(part, "num_replicas") and hasattr(part, "rank"):
            if (part.rank, part.num_replicas) != (place.rank, place.world_size):
                raise DataError(
                    f"rank {place.rank} of {place.world_size}: the {place.purpose} loader's {type(part).__name__} was "
                    f"made for rank {part.rank} of {part.num_replicas}. Leave it out (safetrain splits over ranks), or "
                    f"make it with num_replicas={place.world_size}, rank={place.rank}."
                )
            if hasattr(part, "seed"):
                part.seed = place.seed
            return True
    return False


def _memory(sampler: Any) -> Any:
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    restorable = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
    return sampler.state_dict() if restorable else None


def _nested(sampler: Any) -> Iterator[Any]:
    """The sampler and those inside it: a batch sampler holds the sampler that it draws from as ``sampler``."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _check_one_each(count: int, what: str, items: str, place: Place) -> None:
    if count < place.world_size:
        raise DataError(
            f"{what} gives {count} {items} for {place.world_size} ranks: each rank needs at least one. Use more data, "
            "fewer ranks (launch.nproc_per_node), or loader.drop_last=false with policy.uneven=continue."
        )


def _check_one_batch(samples: Any, batch_size: int, place: Place) -> None:
    """Judge by the smallest share, so that every rank comes to the same answer."""
    if isinstance(samples, SharedOrder):
        share = len(samples.dataset) // place.world_size  # type: ignore[arg-type]
    elif isinstance(samples, Turns):
        share = len(samples.sampler) // place.world_size if isinstance(samples.sampler, Sized) else batch_size
    else:
        share = len(samples)
    if share < batch_size:
        raise DataError(
            f"the training loader has drop_last=True and batches of {batch_size}, but only {share} samples for each of "
            f"the {place.world_size} ranks: no batch is left. Use a smaller batch_size, fewer ranks "
            "(launch.nproc_per_node), or a DataLoader without drop_last (a smaller last batch is weighted exactly)."
        )
