"""Random numbers: which seed each rank, loader worker, epoch and batch draws from.

Every seed is ``derive_seed(job seed, what it is for, numbers that tell it apart)``:

    main process of a rank         ("process", rank)                  once, by ``seed_process``; never again per batch
    batch read by a loader worker  ("batch", rank, epoch, number)     whichever worker reads it, however many there are
    start of a loader worker       ("workers", rank, epoch) + worker  for ``worker_init_fn``; torch adds the worker id.
                                                                      Kept workers: that of epoch 0
    collating a stream's batches   ("collate", rank, epoch, worker)   in a loader worker
    stream that shards itself      ("stream", rank, epoch, worker)
    stream that safetrain shards   ("stream", epoch)                  equal on all ranks: all must see one order
    sampler that knows no ranks    ("order", epoch)                   likewise
    order of a map-style dataset   the job's seed plus the epoch, as DistributedSampler does it

So two runs draw the same numbers, no two batches of a job share a seed, and in loader workers a resumed epoch draws
what it would have drawn.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *words: int | str) -> int:
    """A seed in [0, 2^63) that depends on all arguments; near arguments give unrelated seeds."""
    digest = hashlib.blake2b(repr((seed, *words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def seed_process(seed: int, rank: int) -> None:
    """Seed this rank's main process (random, numpy, torch on every device). Once a job, before the first batch."""
    own = derive_seed(seed, "process", rank)
    seed_generators(own)
    torch.manual_seed(own)


def seed_generators(seed: int) -> None:
    """Seed the CPU generators that data code draws from: random, numpy's legacy one, torch's default one."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed is 10 times slower: it records its stack for CUDA


class OwnRandom:
    """Generators of its own for a piece of code that draws from the global ones.

    Inside ``with``, random, numpy and torch (CPU) go on where that code left them; outside, nobody sees that it drew.
    One ``with`` costs 0.5 ms, nearly all of it numpy's copying of its state.
    """

    def __init__(self, seed: int) -> None:
        outside = _states()
        seed_generators(seed)
        self._other = _states()
        _restore(outside)

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        other, self._other = self._other, _states()
        _restore(other)


class RankRandom:
    """The generators of a rank's main process, for checkpoints: random, numpy, torch on the CPU and on its device."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._seed, self._rank, self._device = seed, rank, device

    def state_dict(self) -> dict[str, Any]:
        states = generator_states()
        return states if self._device.type == "cpu" else states | {"device": torch.cuda.get_rng_state(self._device)}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], world_size: int) -> None:
        """Go on where this rank was; where the ranks are not the same, begin with a seed of its own.

        The seed depends on where rank 0 was, so that a run that is cut twice does not draw the same numbers again.
        """
        if len(states) != world_size:
            digest = hashlib.blake2b(states[0]["torch"].numpy().tobytes()).hexdigest()
            seed_process(derive_seed(self._seed, digest, world_size), self._rank)
            return
        state = states[self._rank]
        restore_generators(state)
        if "device" in state and self._device.type != "cpu":
            torch.cuda.set_rng_state(state["device"], self._device)


def generator_states() -> dict[str, Any]:
    """Where random, numpy and torch (CPU) are, as tensors and plain values. Takes 0.1 ms, nearly all of it numpy's."""
    return _in_plain_values(_states())


def restore_generators(states: Mapping[str, Any]) -> None:
    """Put back what ``generator_states`` returned."""
    version, internal, gauss = states["random"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.default_generator.set_state(states["torch"])


@dataclass(frozen=True, slots=True)
class GeneratorNote:
    """Where the generators of a rank's main process were at some instant; ``device``: None on the CPU."""

    host: tuple[Any, ...]
    device: torch.Tensor | None

    def states(self) -> dict[str, Any]:
        """What ``generator_states`` would have returned then."""
        return _in_plain_values(self.host)

    def restore(self, device: torch.device) -> None:
        """Bring the generators back to there."""
        _restore(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


class GeneratorNotes:
    """Notes where the generators are, cheaply enough for every step: 8 µs.

    To copy numpy's state takes 25 µs, so that is done only where its memory has changed since the note before, or where
    it keeps a normal number to give out next: that is not in its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy: Any = np.random.get_state()
        self._numpy_memory = _numpy_memory()

    def take(self) -> GeneratorNote:
        memory = _numpy_memory()
        if memory is None or memory != self._numpy_memory or self._numpy[3]:
            self._numpy, self._numpy_memory = np.random.get_state(), memory
        on_device = None if self._device.type == "cpu" else torch.cuda.get_rng_state(self._device)
        return GeneratorNote((random.getstate(), self._numpy, torch.default_generator.get_state()), on_device)


def _numpy_memory() -> bytes | None:
    """The words of numpy's legacy generator (624, and how many of them are used up); None of one put in its place."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4) if type(generator) is np.random.MT19937 else None


def _in_plain_values(states: tuple[Any, ...]) -> dict[str, Any]:
    name, keys, *rest = states[1]
    numpy_state = (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    return {"random": states[0], "numpy": numpy_state, "torch": states[2]}


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
