"""Datasets as one rank reads them: what runs in the process that reads, a loader worker or the rank itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from safetrain.legs import Leg, left_of
from safetrain.lifetime import die_with_parent, heed_no_signal_of_a_scheduler
from safetrain.sampling import Place
from safetrain.seeding import OwnRandom, derive_seed, seed_generators
from safetrain.stacks import answer_signals
from safetrain.work import Work


class MapShare(Dataset[Any]):
    """A map-style dataset that is asked for ``Work`` instead of a key: it gives the samples of one batch.

    In a loader worker each batch has a seed of its own, so that it is the same whichever worker reads it.
    """

    def __init__(self, source: Any, place: Place, *, batched: bool, batch_size: int | None) -> None:
        self.source = source
        self.place = place
        self.batched = batched
        self.batch_size = batch_size
        self._epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataset, if it wants it. A kept loader worker learns it from its next batch."""
        if epoch != self._epoch:
            self._epoch = epoch
            _tell_epoch(self.source, epoch)

    def __getitem__(self, work: Work) -> Any:
        self.set_epoch(work.epoch)
        if get_worker_info() is not None:
            seed_generators(derive_seed(self.place.seed, "batch", self.place.rank, work.epoch, work.number))
        reading = work.keys
        try:
            if not self.batched:
                return self.source[work.keys]
            whole_batch = getattr(self.source, "__getitems__", None)
            return whole_batch(work.keys) if whole_batch else [self.source[reading := key] for key in work.keys]
        except StopIteration as error:  # would look like the end of the epoch
            raise RuntimeError(f"{type(self.source).__name__}.__getitem__ raised StopIteration") from error
        except Exception as error:
            error.add_note(f"(the dataset was asked for {reading!r})")
            raise


class TensorShare(MapShare):
    """The same for a ``TensorDataset`` whose samples would be stacked: each tensor is indexed once for a whole batch.

    The same values, in 20 µs a batch instead of 4 µs a sample.
    """

    @staticmethod
    def fits(loader: DataLoader[Any]) -> bool:
        """Whether that is what the loader would do: plain tensors, whose samples lie one behind the other."""
        source = loader.dataset
        return (
            type(source) is TensorDataset
            and loader.collate_fn is default_collate
            and loader.batch_sampler is not None
            and all(type(t) is torch.Tensor and t.layout is torch.strided and t.is_contiguous() for t in source.tensors)
        )

    def __getitem__(self, work: Work) -> Any:
        if not all(type(key) is int for key in work.keys):  # a user's sampler may give slices
            return default_collate(super().__getitem__(work))
        keys = torch.tensor(work.keys)
        return [tensor[keys] for tensor in self.source.tensors]


class StreamShare(IterableDataset[Any]):
    """An iterable dataset of which each loader worker of each rank gives its part, in lists of ``batch_size``."""

    def __init__(self, source: IterableDataset[Any], place: Place, *, batch_size: int | None, drop_last: bool) -> None:
        self.source = source
        self.place = place
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # the one way to reach workers that are kept
        self._legs: tuple[int, Sequence[Leg]] = (-1, ())  # and the epoch they belong to: workers come after it is set

    @property
    def splits_itself(self) -> bool:
        """Whether the dataset, not this class, gives each shard its part."""
        return hasattr(self.source, "set_shard")

    def set_epoch(self, epoch: int, legs: Sequence[Leg] = ()) -> None:
        """Tell the dataset here; its copies in loader workers are told before their next ``iter()``.

        ``legs``: what other ranks had of this epoch.
        """
        self._epoch.fill_(epoch)
        if legs:
            self._legs = epoch, legs
        _tell_epoch(self.source, epoch)

    def __iter__(self) -> Iterator[Any]:
        rank, world_size, seed, _ = self.place
        epoch = int(self._epoch)
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if info is not None:
            _tell_epoch(self.source, epoch)
            seed_generators(derive_seed(seed, "collate", rank, epoch, worker))
        # Ranks are numbered within workers: this way the ranks' parts differ by a sample a worker at most.
        shard, shards = worker * world_size + rank, world_size * workers
        if self.splits_itself:
            self.source.set_shard(shard, shards)  # type: ignore[attr-defined]
            return _Stream(self, OwnRandom(derive_seed(seed, "stream", rank, epoch, worker)), 0, 1)
        legs = self._legs[1] if self._legs[0] == epoch else ()
        return _Stream(self, OwnRandom(derive_seed(seed, "stream", epoch)), shard, shards, legs)


class _EveryNth(Iterator[Any]):
    """Samples ``shard``, ``shard + shards``, ... No generator, no islice: those are at their end after an error."""

    def __init__(self, samples: Iterator[Any], shard: int, shards: int) -> None:
        self._samples = samples
        self._shards = shards
        self._to_pass = shard

    def __next__(self) -> Any:
        for sample in self._samples:
            if self._to_pass == 0:
                self._to_pass = self._shards - 1
                return sample
            self._to_pass -= 1
        raise StopIteration


class _Stream(Iterator[Any]):
    """One shard in batches; the stream's code draws from generators of its own."""

    def __init__(
        self, share: StreamShare, own_random: OwnRandom, shard: int, shards: int, legs: Sequence[Leg] = ()
    ) -> None:
        self._batch_size = share.batch_size
        self._drop_last = share.drop_last
        self._own_random = own_random
        with own_random:
            self._samples = _EveryNth(left_of(iter(share.source), legs), shard, shards)

    def __next__(self) -> Any:
        with self._own_random:
            if self._batch_size is None:
                return next(self._samples)
            batch = list(islice(self._samples, self._batch_size))
        if not batch or (self._drop_last and len(batch) < self._batch_size):
            raise StopIteration
        return batch


def as_it_is(batch: Any) -> Any:
    """The collate function for a share that gives finished batches."""
    return batch


def start_worker(users_own: Callable[[int], None] | None, worker: int) -> None:
    """First thing in a loader worker: tie its life to the rank's, then call the user's ``worker_init_fn``."""
    heed_no_signal_of_a_scheduler()
    die_with_parent()
    answer_signals()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.source)  # the user's code looks here for its own dataset
    if users_own is not None:
        users_own(worker)


def _tell_epoch(source: Any, epoch: int) -> None:
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
