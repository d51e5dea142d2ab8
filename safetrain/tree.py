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


def split(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """``tree`` with an empty tensor on the meta device in place of each tensor, and the tensors by name.

    The name is the path with dots between (``model.0.weight``).
    """
    tensors: dict[str, torch.Tensor] = {}

    def set_aside(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensors[_unique(name, tensors)] = tensor
        return torch.empty_like(tensor, device="meta")

    return rebuild(tree, set_aside), tensors


def join(structure: Any, fill: Callable[[dict[str, torch.Tensor]], None], prefix: str = "") -> Any:
    """The tree whose ``structure`` came from ``split``, with new tensors on the CPU that ``fill`` fills by name: those
    whose names begin with ``prefix``. The others stay empty."""
    tensors: dict[str, torch.Tensor] = {}

    def allocate(name: str, shape: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_like(shape, device="cpu") if name.startswith(prefix) else shape
        tensors[_unique(name, tensors)] = tensor
        return tensor

    tree = rebuild(structure, allocate)
    fill({name: tensor for name, tensor in tensors.items() if not tensor.is_meta})
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
