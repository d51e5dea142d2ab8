"""Whether all ranks have the same training data: its length, and a few items of it, read without leaving a trace.

With loader processes the items are read in a process of their own, as those would do: what a data set opens when it is
first read must not be open before they are forked. Without, they are read here; generators are put back to where they
were, also those that the data set holds.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import select
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from safetrain.feed import Feed
from safetrain.finding import Finding, Job, Said, groups, ranks_of, spread, who
from safetrain.lifetime import die_with_parent
from safetrain.seeding import generator_states, restore_generators, seed_generators

_HASHED_BYTES = 1 << 20  # of each tensor
_LOOK_AT, _LOOK_WIDTH = 2000, 64  # objects of a data set, and items of a list, among which generators are looked for
_PLAIN = (str, bytes, int, float, type(None), np.ndarray)
_LATE_S = 1.0  # a child that was given a time has that much longer to say so
_SEED = 0  # an item that draws must draw the same on all ranks


class Sample(NamedTuple):
    """What is known of a rank's training data.

    Attributes:
        kind: the class of the data set.
        length: samples of the data set that safetrain splits over ranks; None elsewhere.
        digests: of items, by index.
        item_bytes: of the largest item read; None: not known.
        note: why items are not compared, or not all.
    """

    kind: str
    length: int | None
    digests: Mapping[str, str]
    item_bytes: int | None
    note: str


NO_SAMPLE = Sample("not looked at", None, {}, None, "")


def take_sample(feed: Feed, limit_s: float) -> Sample:
    """Look at the data of ``feed``, for ``limit_s`` and one item more."""
    source, kind = feed.dataset, type(feed.dataset).__name__
    if isinstance(source, IterableDataset):
        return Sample(kind, None, {}, None, "a stream can't be read twice")
    length = feed.shared_samples
    if not length:
        return Sample(kind, None, {}, None, "your own sampler knows its keys")
    indices = sorted({0, length // 2, length - 1})
    if feed.loader.num_workers:
        digests, item_bytes, note = _in_child(source, indices, limit_s)
    else:
        with untouched(source):
            digests, item_bytes, note = read_items(source, indices, limit_s)
    return Sample(kind, length, digests, item_bytes, note)


def read_items(source: Any, indices: Sequence[int], limit_s: float) -> tuple[dict[str, str], int | None, str]:
    """Digests of the items at ``indices``, the bytes of the largest, and why there are fewer.

    The first is read twice: a data set that gives another item then can't be compared.
    """
    digests: dict[str, str] = {}
    largest, begin = 0, time.monotonic()
    for index in (indices[0], *indices):
        seed_generators(_SEED)
        try:
            digest, size = _digest(source[index])
        except Exception as error:  # noqa: BLE001  # the loop has a policy for it; here it is only said
            return {}, largest or None, f"item {index} can't be read: {type(error).__name__}: {error}"
        if digests.setdefault(str(index), digest) != digest:
            return {}, size, "items are not the same when they are read again"
        largest = max(largest, size)
        if time.monotonic() - begin > limit_s and index != indices[-1]:
            return digests, largest, f"reading is slow: {len(digests)} of {len(indices)} items compared"
    return digests, largest, ""


def _in_child(source: Any, indices: Sequence[int], limit_s: float) -> tuple[dict[str, str], int | None, str]:
    """``read_items`` in a forked process, which is killed if it takes too long."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: that threads run, as they do here
        pid = os.fork()
    if pid == 0:  # what follows may not come back
        try:
            if threading.current_thread() is threading.main_thread():
                signal.set_wakeup_fd(-1)  # it belongs to the rank
            die_with_parent()
            faulthandler.disable()  # its report would be taken for one of the rank's own end
            torch.set_num_threads(1)  # OpenMP does not survive a fork
            os.write(writing, json.dumps(read_items(source, indices, limit_s)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        ready = select.select([reading], [], [], limit_s + _LATE_S)[0]
        said = os.read(reading, 1 << 16) if ready else b""
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not said:
        why = "ended the process that read it" if ready else f"takes longer than {limit_s:g} s"
        return {}, None, f"an item {why}"
    digests, size, note = json.loads(said)
    return digests, size, note


@contextmanager
def untouched(source: Any) -> Iterator[None]:
    """Afterwards the global generators, and those that ``source`` holds, are where they were."""
    states, own = generator_states(), [(one, _state(one)) for one in own_generators(source)]
    try:
        yield
    finally:
        restore_generators(states)
        for generator, state in own:
            _restore(generator, state)


def own_generators(source: Any) -> list[Any]:
    """Generators in the attributes of ``source`` and of what it holds: a data set in a subset, transforms in a list."""
    found, seen, to_see = [], {id(source)}, deque([source])
    while to_see and len(seen) < _LOOK_AT:
        one = to_see.popleft()
        if isinstance(one, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            found.append(one)
            continue
        inside: list[Any] = []
        if isinstance(one, Mapping):
            inside = list(islice(one.values(), _LOOK_WIDTH))
        elif isinstance(one, (list, tuple)):
            inside = list(one[:_LOOK_WIDTH])
        elif hasattr(one, "__dict__") and not isinstance(one, (type, ModuleType, torch.Tensor)):
            inside = list(vars(one).values())
        new = {id(part): part for part in inside if id(part) not in seen and not isinstance(part, _PLAIN)}
        seen.update(new)
        to_see.extend(new.values())
    return found


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _digest(item: Any) -> tuple[str, int]:
    """Of an item, whatever it is made of; and its bytes."""
    digest, size = hashlib.sha256(), 0
    for piece, count in _pieces(item):
        digest.update(piece)
        size += count
    return digest.hexdigest()[:12], size


def _pieces(item: Any) -> Iterator[tuple[bytes, int]]:
    if isinstance(item, torch.Tensor):
        array = item.detach().cpu().flatten()[: _HASHED_BYTES // max(1, item.element_size())]
        yield f"{tuple(item.shape)}{item.dtype}".encode(), 0
        yield array.view(torch.uint8).numpy().tobytes(), item.numel() * item.element_size()
    elif isinstance(item, np.ndarray):
        yield f"{item.shape}{item.dtype}".encode(), 0
        yield item.tobytes()[:_HASHED_BYTES], item.nbytes
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield repr(key).encode(), 0
            yield from _pieces(value)
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _pieces(value)
    elif isinstance(item, (str, bytes, int, float, complex, type(None))):
        yield repr(item).encode(), 8
    elif hasattr(item, "tobytes"):  # a picture
        yield item.tobytes()[:_HASHED_BYTES], len(item.tobytes())
    else:
        yield type(item).__qualname__.encode(), 0


@dataclass(frozen=True)
class TrainingData:
    """One data set on all ranks."""

    name: str = "dataset"

    def look(self, here: Job) -> dict[str, Any]:
        return here.sample._asdict()

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        remedy = "Build the same one on all ranks: draw with the config's seed, read the same files."
        if len(groups(said, lambda facts: (facts["kind"], facts["length"]))) > 1:
            value = spread(said, lambda facts: _described(facts))
            words = (
                f"the training data is not the same on all ranks: {value}. Their shares would repeat some samples and "
            )
            words += "leave out others."
            return [Finding(self.name, value, "refuse", (), words, remedy)]
        common = set.intersection(*(set(one.facts["digests"]) for one in said))
        for index in sorted(common, key=int):
            found = groups(said, lambda facts, i=index: facts["digests"][i])  # type: ignore[misc]
            if len(found) > 1:
                odd = min(found.values(), key=len)
                told = ", ".join(f"{digest} on {who(some, said)}" for digest, some in found.items())
                words = f"item {index} of the training data is not the same on all ranks (digests {told})."
                return [Finding(self.name, f"item {index} differs", "warn", ranks_of(odd), words, remedy)]
        note = next((one.facts["note"] for one in said if one.facts["note"]), "")
        compared = f"items {', '.join(sorted(common, key=int))} the same" if common and len(said) > 1 else ""
        return [Finding(self.name, ", ".join(filter(None, [_described(said[0].facts), compared, note])))]


def _described(facts: Mapping[str, Any]) -> str:
    return facts["kind"] if facts["length"] is None else f"{facts['kind']} of {facts['length']:,} samples"


@dataclass(frozen=True)
class Batches:
    """How many batches each rank has in an epoch."""

    name: str = "batches"

    def look(self, here: Job) -> dict[str, Any]:
        uneven = type(here.trainer.policies.uneven).__name__
        return {"batches": here.feed.batches_per_epoch, "uneven": uneven}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        counts = [one.facts["batches"] for one in said]
        if None in counts:
            return [Finding(self.name, "not known before they are read")]
        value = spread(said, lambda facts: f"{facts['batches']:,}") + (" a rank" if len(set(counts)) == 1 else "")
        least, most = min(counts), max(counts)
        if most - least <= 1 or said[0].facts["uneven"] != "UnevenStop":
            return [Finding(self.name, value)]
        fewest = [one for one in said if one.facts["batches"] == least]
        words = (
            f"an epoch ends for all ranks after the {least} batches of {who(fewest, said)}; others have up to {most}."
        )
        remedy = "Give every rank as many, or set policy/uneven=continue."
        return [Finding(self.name, value, "warn", ranks_of(fewest), words, remedy)]
