"""The feed that the loop takes batches from: it walks through a rank's loader epoch by epoch, and can begin inside one.

It never raises what a dataset raises: an error is something that the ranks decide on together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from safetrain.batches import count_samples, move
from safetrain.errors import UsageError
from safetrain.legs import Leg
from safetrain.sampling import Plan
from safetrain.seeding import GeneratorNote, GeneratorNotes, derive_seed, generator_states, restore_generators
from safetrain.shares import MapShare, StreamShare
from safetrain.work import Work

_END = object()  # no batch: what next() gives after the last one


class Fetched(NamedTuple):
    """What a feed gave: a batch (with its samples, where they can be counted), an error, or the epoch's end; ``work``:
    which batch it is, or would have been."""

    batch: Any = None
    samples: int | None = None
    error: Exception | None = None
    empty: bool = False
    work: Work | None = None


class Position(NamedTuple):
    """Where a rank stands in an epoch.

    Attributes:
        batches: taken by this rank, of its share of what ``legs`` have left.
        legs: what was taken before by other ranks than now, or in other batches.
        random: where the generators were before the batch that is fetched ahead; None: that draws from none of them.
    """

    epoch: int
    batches: int
    legs: tuple[Leg, ...] = ()
    random: Mapping[str, Any] | None = None


Mark = tuple[Position, GeneratorNote | None]
"""A position, and where the generators were before the batch that is fetched ahead."""


class Sharing(NamedTuple):
    """How takers take turns over an epoch's order, ``items_per_batch`` of its items at a time."""

    countable: bool  # whether it is known from the takers' batches which items are left
    takers: int
    items_per_batch: int
    seed: int
    shuffled: bool | None  # by safetrain; None: the order is the user's
    samples: int | None


class Feed:
    """One rank's batches, epoch by epoch, on its device.

    Attributes:
        batch_size: samples of a full batch; None where the user's loader does not say.
        remembers: note what each batch that is fetched ahead draws from: for a run that is saved.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        """Take batches from a loader made by ``build_loader``."""
        if not isinstance(loader.dataset, (MapShare, StreamShare)):
            raise UsageError("Feed takes a loader made by build_loader: only that one knows its rank's share")
        self._loader = loader
        self._share = loader.dataset
        self._plan = loader.sampler if isinstance(loader.sampler, Plan) else None
        self._device = device
        self._batches: Iterator[Any] | None = None
        self._ahead: Fetched | None = None
        self._notes = GeneratorNotes(device)
        self._random_before_ahead: GeneratorNote | None = None
        self._resume_at: Position | None = None
        self._position = Position(0, 0)
        self._fetched = 0  # batches of this epoch
        self._memory_at_start: list[Any] = []
        self.remembers = False
        self.batch_size: int | None = self._share.batch_size

    @property
    def loader_processes(self) -> int:
        """Of this rank; 0: it reads by itself."""
        return self._loader.num_workers

    @property
    def loader(self) -> DataLoader[Any]:
        """What it walks through."""
        return self._loader

    @property
    def dataset(self) -> Any:
        """The user's, whole."""
        return self._share.source

    @property
    def ahead(self) -> Fetched | None:
        """What the next ``take`` gives, if it is here already."""
        return self._ahead

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches of a whole epoch on this rank; None for streams, and for a sampler without a length."""
        try:
            return None if self._plan is None else len(self._plan)
        except TypeError:
            return None

    @property
    def shared_samples(self) -> int | None:
        """Of the dataset that safetrain splits over ranks: must be equal on all ranks. None elsewhere."""
        return None if self._plan is None else self._plan.shared_samples

    @property
    def order_digest(self) -> int | None:
        """Of a rank-unaware sampler's order: must be equal on all ranks once an epoch has begun. None elsewhere."""
        return None if self._plan is None else self._plan.order_digest

    def begin_epoch(self, epoch: int, skip_batches: int = 0) -> None:
        """Start an epoch, without its first ``skip_batches`` batches. Fetches the first batch ahead.

        A map-style dataset is not asked for the skipped ones; a stream has to be read through them. What goes wrong is
        the error of the next ``take``.
        """
        if self._resume_at is None:
            self._begin(Position(epoch, skip_batches))
            return
        position, self._resume_at = self._resume_at, None
        if position.epoch != epoch:
            raise UsageError(f"begin_epoch({epoch}): the feed was to go on in epoch {position.epoch}")
        outside = generator_states()
        self._begin(position)
        restore_generators(outside)  # the batch ahead was drawn before these came to be where they are

    def resume_at(self, position: Position) -> None:
        """Let the next ``begin_epoch`` go on where another process was: the same batches come, with the same draws."""
        self._resume_at = position

    def _begin(self, position: Position) -> None:
        self._position, self._memory_at_start = position, self.memory()
        self._ahead, self._fetched = None, position.batches
        self._batches = iter(())  # first: workers of an epoch left early go before new ones come
        try:
            self._batches = self._start(position)
        except Exception as error:  # noqa: BLE001 - handed on, so that all ranks decide on it
            self._ahead = Fetched(error=error)
        if position.random is not None:
            restore_generators(position.random)
        self.look_ahead()

    def _start(self, position: Position) -> Iterator[Any]:
        loader, place = self._loader, self._share.place
        epoch, skip_batches, legs, _ = position
        if isinstance(self._share, StreamShare):
            self._share.set_epoch(epoch, legs)
        else:
            self._share.set_epoch(epoch)
        if self._plan is not None:
            self._plan.set_epoch(epoch, skip_batches, legs)
            skip_batches = 0
        assert loader.generator is not None
        workers_start_in = 0 if loader.persistent_workers else epoch  # a resumed run starts them anew, with equal seeds
        loader.generator.manual_seed(derive_seed(place.seed, "workers", place.rank, workers_start_in))
        batches = iter(loader)
        for _ in range(skip_batches):
            with suppress(Exception):  # the ranks have decided on it when it was read first
                next(batches, None)
        return batches

    def look_ahead(self) -> bool:
        """Fetch one batch to the device and keep it for ``take``: False when this rank has no more in this epoch."""
        if self._ahead is None:
            draws_here = self.remembers and self._loader.num_workers == 0
            self._random_before_ahead = self._notes.take() if draws_here else None
            self._ahead = self._fetch()
        return not self._ahead.empty

    def take(self) -> Fetched:
        """The next batch, on the device. What dataset, sampler, loader worker or move raised is in ``error``."""
        fetched, self._ahead = self._ahead or self._fetch(), None
        self._position = self._position._replace(batches=self._position.batches + (not fetched.empty))
        return fetched

    @property
    def at_end(self) -> bool:
        """Whether this rank is known to have no more in this epoch."""
        return self._ahead is not None and self._ahead.empty

    @property
    def position(self) -> Position:
        """Where this rank stands in its epoch; exact to the draws of the batch that is fetched ahead, if ``remembers``
        was true when it was."""
        note = self._random_before_ahead
        return self._position._replace(random=None if note is None else note.states())

    def mark(self) -> Mark:
        """Where this rank stands; to note it costs nothing."""
        return self._position, self._random_before_ahead

    def go_back(self, mark: Mark) -> None:
        """Let ``position`` be what it was; the batches that have come since do not come again in this process."""
        self._position, self._random_before_ahead = mark

    def memory(self, *, at_start: bool = False) -> list[Any]:
        """What samplers keep from epoch to epoch, as it is now, or as it was when this epoch began."""
        if at_start:
            return self._memory_at_start
        return [] if self._plan is None else self._plan.memory()

    def restore_memory(self, memory: Sequence[Any]) -> None:
        """Before ``begin_epoch``."""
        if self._plan is not None:
            self._plan.restore_memory(memory)

    @property
    def sharing(self) -> Sharing:
        """How an epoch's order is shared out: where two runs agree in it, a position in the one holds in the other."""
        place, share, plan = self._share.place, self._share, self._plan
        if plan is not None:
            return Sharing(
                plan.shares_out, place.world_size, plan.items_per_batch, place.seed, plan.shuffled, plan.shared_samples
            )
        assert isinstance(share, StreamShare)
        workers = self._loader.num_workers
        # several workers end at different batches: how much each of them has read is not known from outside
        countable = not share.splits_itself and workers <= 1
        return Sharing(countable, place.world_size * max(1, workers), share.batch_size or 1, place.seed, None, None)

    def _fetch(self) -> Fetched:
        if self._batches is None:
            raise UsageError("Feed.begin_epoch(epoch) comes before the first batch")
        work = None
        try:
            batch = next(self._batches, _END)
            if batch is _END:
                return Fetched(empty=True)
            work = self._work()
            batch = move(batch, self._device, non_blocking=self._loader.pin_memory)
            return Fetched(batch, count_samples(batch), work=work)
        except Exception as error:  # noqa: BLE001 - handed on, so that all ranks decide on it
            if "Original Traceback" in str(error):
                # The worker's traceback is in the text. The one of here closes a cycle over torch's iterator, which
                # would then be torn down in disorder and wait 5 s for each of its workers.
                error.__traceback__ = None
            return Fetched(error=error, work=work or self._work())

    def _work(self) -> Work | None:
        """Which batch the loader has just given, or failed to give; None where that can't be told."""
        number, self._fetched = self._fetched, self._fetched + 1
        if self._plan is None:
            size = self._share.batch_size if self._loader.num_workers <= 1 else None
            return Work(self._position.epoch, number, size and range(number * size, (number + 1) * size))
        handed_out = self._plan.handed_out
        work = handed_out.popleft() if handed_out else None  # none: the sampler failed
        return work if self._loader.in_order or self._loader.num_workers <= 1 else None
