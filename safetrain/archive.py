"""The files of one checkpoint: what they are called and how they are written and read. Nothing here talks to a rank.

    __0_0.distcp, .metadata   the tensors all ranks share (tensor_files.py)
    structure.pt              the nested dicts around them, with all values that are no tensors
    rank_<n>.pt               what is rank n's alone

Everything is read to the CPU: a tensor that went back to the GPU it came from would take memory on that of rank 0.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from safetrain import tree
from safetrain.errors import CheckpointError

STRUCTURE = "structure.pt"
# beside what torch.load trusts by itself: what arrays and their scalars are made of, and how pickle writes b"" and sets
_HARMLESS = [
    np.ndarray, np.dtype, *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
    np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0], bytes, frozenset,
]  # fmt: skip
_UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)


def write_shared(folder: Path, structure: Any, tensors: Mapping[str, torch.Tensor]) -> list[Path]:
    """Write what ``tree.split`` gave; returns the files."""
    from safetrain import tensor_files  # says why not at the top

    _save(structure, folder / STRUCTURE)
    before = set(folder.iterdir())
    tensor_files.write(folder, tensors)
    return [folder / STRUCTURE, *sorted(set(folder.iterdir()) - before)]


def read_shared(folder: Path) -> dict[str, Any]:
    """What ``write_shared`` wrote.

    Raises:
        CheckpointError: it can't be read.
    """
    with _reading(folder):
        return tree.join(_load(folder / STRUCTURE), lambda tensors: _fill(folder, tensors))


def read_part(folder: Path, name: str) -> Any:
    """The same, but only what is under one of its keys.

    Raises:
        CheckpointError: it can't be read, or there is no such key.
    """
    with _reading(folder):
        structure = _load(folder / STRUCTURE)
        if name not in structure:
            raise CheckpointError(f"{folder} has no {name}; it has {', '.join(structure)}")
        return tree.join(structure, lambda tensors: _fill(folder, tensors), prefix=name)[name]


def write_own(folder: Path, rank: int, own: Mapping[str, Any]) -> Path:
    """Write what is this rank's; returns the file."""
    path = own_file(folder, rank)
    _save(own, path)
    return path


def read_own(folder: Path, rank: int) -> dict[str, Any]:
    """
    Raises:
        CheckpointError: it can't be read.
    """
    with _reading(folder):
        return _load(own_file(folder, rank))


def own_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pt"


def _fill(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    if tensors:
        from safetrain import tensor_files  # says why not at the top

        tensor_files.read_into(tensors, folder)


def _save(value: Any, path: Path) -> None:
    """``torch.save`` by way of memory: where the disk is full, by itself it only says "unexpected pos 64"."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(buffer.getbuffer())


def _load(path: Path) -> Any:
    with torch.serialization.safe_globals(_HARMLESS):
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise CheckpointError(f"{folder} can't be read: {type(error).__name__}: {error}") from error
