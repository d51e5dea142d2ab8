"""Batches of any shape: how many samples one holds, and how it comes to the device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def count_samples(batch: Any) -> int | None:
    """Dimension 0 of the first tensor in nested dicts, tuples, lists and dataclasses; None where there is none.

    Tensors without dimensions are passed over: they hold no samples.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    for part in _parts(batch):
        if (count := count_samples(part)) is not None:
            return count
    return None


def move(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """The batch with its tensors on ``device``: a new container of the same type; what holds no tensor is passed on.

    An object that brings its own ``to(device)`` (a packed sequence, a graph) moves itself.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if type(batch) is list or type(batch) is tuple:  # as most are: first, since what follows costs 10 µs
        return type(batch)([move(part, device, non_blocking) for part in batch])
    if hasattr(batch, "to") and not isinstance(batch, type):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # keeps a defaultdict's factory, a UserDict's class
        moved.update({key: move(value, device, non_blocking) for key, value in batch.items()})
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(part, device, non_blocking) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(part, device, non_blocking) for part in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for part in fields(batch):  # past its own __setattr__: a frozen one has parts to move, too
            object.__setattr__(twin, part.name, move(getattr(batch, part.name), device, non_blocking))
        return twin
    return batch


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, (list, tuple)):
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return batch
    if is_dataclass(batch):
        return (getattr(batch, part.name) for part in fields(batch))
    return ()
