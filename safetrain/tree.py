"""Nested state, as optimizers and the like give it: copied container by container, each tensor with a name of its own.

Only what ``torch.load(weights_only=True)`` reads back is let through. Anything else is refused when it is saved, by the
name of its place: at the time it is needed, it would be too late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch

from safetrain.errors import UsageError
from safetrain.pieces import Piece, is_shard

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_SEQUENCES = (list, tuple, set, frozenset)


def rebuild(tree: Any, of_tensor: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """A copy of ``tree`` with ``of_tensor(name, tensor)`` in place of each tensor; always in the same order.

    Raises:
        UsageError: something in it can't be written and read back as it was.
    """
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        return of_tensor(name, _strided(tree, name))
    if kind in (dict, OrderedDict):
        copy = kind((_plain(key, name), rebuild(value, of_tensor, _below(name, key))) for key, value in tree.items())
        if kind is OrderedDict:  # where a module's state_dict keeps the versions of its parts
            vars(copy).update(rebuild(vars(tree), of_tensor, name))
        return copy
    if kind in _SEQUENCES:
        return kind(rebuild(value, of_tensor, _below(name, index)) for index, value in enumerate(tree))
    return _plain(tree, name)


def split(tree: Any) -> tuple[Any, dict[str, Piece]]:
    """``tree`` with an empty tensor on the meta device in place of each tensor, and what this rank has of each.

    The name is the path with dots between (``model.0.weight``).
    """
    pieces: dict[str, Piece] = {}

    def set_aside(name: str, tensor: torch.Tensor) -> torch.Tensor:
        pieces[_unique(name, pieces)] = Piece.of(tensor, name)
        if is_shard(tensor):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return torch.empty_like(tensor, device="meta")

    return rebuild(tree, set_aside), pieces


def on_cpu(_name: str, empty: torch.Tensor) -> torch.Tensor:
    """New memory for the whole of a tensor."""
    return torch.empty_like(empty, device="cpu")


def join(
    structure: Any,
    fill: Callable[[dict[str, Piece]], None],
    place: Callable[[str, torch.Tensor], torch.Tensor] = on_cpu,
) -> Any:
    """The tree whose ``structure`` came from ``split``, with new tensors that ``fill`` fills by name.

    ``place`` gives the tensor, or this rank's shard of it, for a name and an empty one of its kind; or that empty one,
    which then stays empty.
    """
    pieces: dict[str, Piece] = {}
    taken: set[str] = set()

    def allocate(name: str, found: torch.Tensor) -> torch.Tensor:
        name = _unique(name, taken)
        taken.add(name)
        tensor = place(name, found) if found.is_meta else found
        if found.is_meta and not tensor.is_meta:
            pieces[name] = Piece.of(tensor, name)
        return tensor

    tree = rebuild(structure, allocate)
    fill(pieces)
    return tree


def _unique(name: str, taken: Container[str]) -> str:
    """{"a.b": ...} and {"a": {"b": ...}} are two places: the second of a name gets ``#2``."""
    unique, times = name, 1
    while unique in taken:
        times += 1
        unique = f"{name}#{times}"
    return unique


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _strided(tensor: torch.Tensor, name: str) -> torch.Tensor:
    bare = tensor.detach()
    if is_shard(bare):
        return bare
    if type(bare) is not torch.Tensor or bare.layout is not torch.strided or bare.is_quantized:
        kind = type(bare).__name__ if type(bare) is not torch.Tensor else f"tensor of layout {bare.layout}"
        raise UsageError(f"a checkpoint can't hold {name}: it is a {kind}. Save it as dense, whole tensors.")
    return bare


def _plain(value: Any, name: str) -> Any:
    kind = type(value)
    if kind in _PLAIN or (isinstance(value, np.generic) and not isinstance(value, np.void)):
        return value
    if kind is tuple:
        return tuple(_plain(item, name) for item in value)
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        return value.copy()
    raise UsageError(
        f"a checkpoint can't hold {name or 'this state'}: it is a {kind.__module__}.{kind.__qualname__}. Save it as "
        "numbers, text, tensors, arrays, or dicts, lists and tuples of these."
    )
