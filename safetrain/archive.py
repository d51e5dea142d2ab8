"""The files of one checkpoint: what they are called and how they are written and read. Nothing here talks to a rank.

    __<n>_0.distcp            what rank n wrote of the tensors all ranks share: its shards, rank 0 what is not divided
    .metadata                 where each piece of each tensor is (tensor_files.py)
    structure.pt              the nested dicts around them, with all values that are no tensors
    rank_<n>.pt               what is rank n's alone

Everything is read to the CPU: a tensor that went back to the GPU it came from would take memory on that of rank 0.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from safetrain import tree
from safetrain.errors import CheckpointError
from safetrain.pieces import Piece

STRUCTURE = "structure.pt"
# beside what torch.load trusts by itself: what arrays and their scalars are made of, and how pickle writes b"" and sets
_HARMLESS = [
    np.ndarray, np.dtype, *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
    np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0], bytes, frozenset,
]  # fmt: skip
_UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)


def write_pieces(folder: Path, rank: int, pieces: Mapping[str, Piece]) -> tuple[list[Path], str]:
    """Write what is this rank's of what ``tree.split`` gave; returns the files, and for ``write_shared`` what is where
    in them."""
    if not any(piece.local.numel() for piece in pieces.values()):
        return [], ""
    from safetrain import tensor_files  # says why not at the top

    names, index = tensor_files.write(folder, rank, pieces)
    return [folder / name for name in names], index


def write_shared(folder: Path, structure: Any, indexes: Sequence[str]) -> list[Path]:
    """Write the structure that ``tree.split`` gave, and where all ranks' pieces are; returns the files."""
    _save(structure, folder / STRUCTURE)
    if not any(indexes):
        return [folder / STRUCTURE]
    from safetrain import tensor_files  # says why not at the top

    return [folder / STRUCTURE, folder / tensor_files.finish(folder, [index for index in indexes if index])]


def read_shared(folder: Path, place: Callable[[str, torch.Tensor], torch.Tensor] = tree.on_cpu) -> dict[str, Any]:
    """What all ranks wrote together; ``place``: where to, see ``tree.join``.

    Raises:
        CheckpointError: it can't be read.
    """
    with _reading(folder):
        return fill(folder, _load(folder / STRUCTURE), place)


def fill(folder: Path, shared: Any, place: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """``shared`` with what was left empty when it was read.

    Raises:
        CheckpointError: it can't be read.
    """
    with _reading(folder):
        return tree.join(shared, lambda pieces: _fill(folder, pieces), place)


def read_part(folder: Path, name: str) -> Any:
    """The same, but only what is under one of its keys.

    Raises:
        CheckpointError: it can't be read, or there is no such key.
    """
    with _reading(folder):
        structure = _load(folder / STRUCTURE)
        if name not in structure:
            raise CheckpointError(f"{folder} has no {name}; it has {', '.join(structure)}")
        return fill(folder, structure, lambda at, empty: tree.on_cpu(at, empty) if at.startswith(name) else empty)[name]


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


def _fill(folder: Path, pieces: Mapping[str, Piece]) -> None:
    wanted = {name: piece for name, piece in pieces.items() if piece.local.numel()}
    if wanted:
        from safetrain import tensor_files  # says why not at the top

        tensor_files.read_into(wanted, folder)


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
