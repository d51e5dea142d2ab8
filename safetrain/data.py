"""The loader of one rank: any dataset or DataLoader with the share of this rank (sampling.py, shares.py), seeds that
differ where they must (seeding.py), and loader workers that die with their rank."""

from __future__ import annotations

import logging
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from safetrain.batches import count_samples, move
from safetrain.comm import Comm
from safetrain.config import Loader
from safetrain.errors import DataError, UsageError
from safetrain.feed import Feed, Fetched
from safetrain.lifetime import loader_context
from safetrain.sampling import Place, plan_batches
from safetrain.shares import MapShare, StreamShare, TensorShare, as_it_is, start_worker

logger = logging.getLogger("safetrain")

__all__ = ["Feed", "Fetched", "build_feed", "build_loader", "count_samples", "move"]


def build_loader(
    data: Dataset[Any] | DataLoader[Any], options: Loader, *, rank: int, world_size: int, seed: int, train: bool
) -> DataLoader[Any]:
    """A loader of this rank's share of ``data``, for a ``Feed``.

    A DataLoader given as ``data`` keeps its own settings; of ``options`` only ``drop_last`` applies to it. For training
    from map-style data that means: leave out the samples (fewer than ``world_size``) that would make the ranks' shares
    differ. A smaller last batch is another matter: it is kept unless the given DataLoader itself drops it.

    An IterableDataset is read whole by every loader worker of every rank, each of which keeps its part of the samples.
    Where that costs too much, or the dataset splits over ranks and workers on its own, it has a method
    ``set_shard(shard, shards)``: called before each ``iter()``; all that then comes out of the dataset is used.

    A dataset's ``set_epoch(epoch)`` is called before each epoch, here and in the process that reads it.

    Raises:
        DataError: no data, too few for the ranks, or a loader that can't be split over ranks; with the numbers.
    """
    place = Place(rank, world_size, seed, train)
    if not 0 <= rank < world_size:
        raise UsageError(f"build_loader: rank {rank} is not below world_size {world_size}")
    if isinstance(data, DataLoader):
        given = data
        _say_what_has_no_effect(options, place)
    else:
        given = _plain_loader(data, options, place)
    _check_dataset(given.dataset, place)
    if type(given).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"the {place.purpose} loader's class {type(given).__name__} iterates in its own way, which would be lost "
            "when its data is split over ranks: hand over its dataset, or a plain torch.utils.data.DataLoader."
        )
    share: MapShare | StreamShare
    collate = given.collate_fn
    if isinstance(given.dataset, IterableDataset):
        plan = None
        share = StreamShare(given.dataset, place, batch_size=given.batch_size, drop_last=given.drop_last and train)
    else:
        plan = plan_batches(given, place, drop_last=options.drop_last)
        kind, batched = MapShare, given.batch_sampler is not None
        if TensorShare.fits(given):
            kind, collate = TensorShare, as_it_is
        share = kind(given.dataset, place, batched=batched, batch_size=plan.batch_size)
    return DataLoader(
        share,
        batch_size=None,  # the share makes lists of samples, which the user's collate_fn turns into a batch
        sampler=plan,
        collate_fn=collate,
        num_workers=given.num_workers,
        persistent_workers=given.persistent_workers,
        prefetch_factor=given.prefetch_factor if given.num_workers else None,
        pin_memory=given.pin_memory and torch.accelerator.is_available(),  # without one there is nothing to pin for
        timeout=given.timeout,
        worker_init_fn=partial(start_worker, given.worker_init_fn),
        multiprocessing_context=loader_context(given.multiprocessing_context) if given.num_workers else None,
        generator=torch.Generator(),  # a loader must not draw from the generator that the model's dropout draws from
        in_order=given.in_order,
    )


def build_feed(data: Dataset[Any] | DataLoader[Any], options: Loader, comm: Comm, *, seed: int, train: bool) -> Feed:
    """This rank's batches of ``data``, on its device."""
    place = {"rank": comm.rank, "world_size": comm.world_size, "seed": seed}
    return Feed(build_loader(data, options, train=train, **place), comm.device)


def check_same_order(feed: Feed, comm: Comm, epoch: int) -> None:
    """Hold that the ranks take their shares of one order of one dataset; all ranks call it when ``epoch`` has begun.

    Raises:
        DataError: on all of them, with what differs.
    """
    sizes, digests = zip(*comm.gather((feed.shared_samples, feed.order_digest)), strict=True)
    if len(set(sizes)) > 1:
        found = ", ".join(f"{size} on rank {rank}" for rank, size in enumerate(sizes))
        raise DataError(
            f"epoch {epoch}: the training dataset has different numbers of samples ({found}), so the ranks' shares "
            "would repeat some and leave out others. Build the same one on all ranks: draw with the config's seed."
        )
    if len(set(digests) - {None}) > 1:
        raise DataError(
            f"epoch {epoch}: the training sampler gives each rank another order, so samples would be repeated and "
            "left out. Seed it from the config and the epoch alone, or leave it out and set loader.shuffle=true."
        )


def _plain_loader(dataset: Dataset[Any], options: Loader, place: Place) -> DataLoader[Any]:
    """The DataLoader that a user would write for one process."""
    _check_dataset(dataset, place)
    workers = options.num_workers
    stream = isinstance(dataset, IterableDataset)
    return DataLoader(
        dataset,
        batch_size=options.batch_size if place.train else (options.val_batch_size or options.batch_size),
        shuffle=options.shuffle and place.train and not stream,
        num_workers=workers,
        pin_memory=options.pin_memory,
        prefetch_factor=options.prefetch_factor,
        persistent_workers=options.persistent_workers and workers > 0,
        timeout=options.timeout_s if workers else 0,  # there is nobody to wait for
    )


def _say_what_has_no_effect(options: Loader, place: Place) -> None:
    """A DataLoader of the user's has settings of its own."""
    names = [item.name for item in fields(options) if item.name != "drop_last"]
    idle = [f"loader.{name}" for name in names if getattr(options, name) != getattr(Loader(), name)]
    if idle and place.rank == 0 and place.train:
        logger.warning(
            "%s: no effect, since the training data is a DataLoader with settings of its own. Set them there, or give "
            "the dataset instead.",
            ", ".join(idle),
        )


def _check_dataset(dataset: Any, place: Place) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"the {place.purpose} data is a {name}: allowed are a dataset with __getitem__ and __len__, "
            "a torch.utils.data.IterableDataset, or a torch.utils.data.DataLoader of one of them"
        )
    if len(dataset) == 0:
        raise DataError(f"the {place.purpose} dataset {name} is empty (0 samples): check where it looks for its files")
