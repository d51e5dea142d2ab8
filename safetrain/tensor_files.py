"""Tensors by name in the format of torch.distributed.checkpoint, each rank's pieces in a file of its own.

That package has the ranks meet in collectives to plan what each writes. Here each writes what it has and says what is
where (its *index*), and rank 0 joins what all have said in ``.metadata``: the ranks' threads meet on the store alone.

Imported when a checkpoint is first written or read, and not by a rank that has nothing to write: that package takes as
long to import as torch itself, a second.
"""

from __future__ import annotations

import base64
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from safetrain.pieces import Piece

# the tensors are read by each rank alone, which torch takes for an accident
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def write(folder: Path, rank: int, pieces: Mapping[str, Piece]) -> tuple[list[str], str]:
    """Write ``pieces`` into a file of this rank's in ``folder``; returns the names of its files and its index. Whoever
    seals the files sees to it that they are on the disk, once.

    Raises:
        OSError: what the system said.
        RuntimeError: torch could not.
    """
    try:
        writer = FileSystemWriter(folder, sync_files=False)
        plan = SavePlan([_write_item(name, piece) for name, piece in pieces.items() if piece.local.numel()])
        (*_, plan) = writer.prepare_global_plan([plan] * (rank + 1))  # gives the plan of each rank a name for its file
        results = writer.write_data(plan, _Pieces(pieces)).wait()
    except (CheckpointException, RuntimeError) as error:
        raise _os_error_beneath(error) or RuntimeError(str(error)) from error
    files = sorted({result.storage_data.relative_path for result in results})
    return files, base64.b64encode(pickle.dumps((plan, results))).decode()


def finish(folder: Path, indexes: Sequence[str]) -> str:
    """Write where each piece of each tensor is, from all ranks' indexes; returns the name of the file.

    Raises:
        RuntimeError: the pieces do not make whole tensors.
    """
    plans, results = zip(*(pickle.loads(base64.b64decode(index)) for index in indexes), strict=True)
    try:
        _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(list(plans))
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}  # for torch's own readers
    FileSystemWriter(folder, sync_files=False).finish(metadata, list(results))
    return ".metadata"


def read_into(pieces: Mapping[str, Piece], folder: Path) -> None:
    """Fill ``pieces`` from what ``folder`` holds under their names, whatever pieces it was written in.

    Raises:
        RuntimeError: torch could not; and what else it raises on a file that is damaged.
    """
    try:
        load(dict(pieces), storage_reader=FileSystemReader(folder), planner=_Slices(), no_dist=True)
    except CheckpointException as error:  # no Exception
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.local.shape)


def _write_item(name: str, piece: Piece) -> WriteItem:
    facts = TensorWriteData(_chunk(piece), TensorProperties.create_from_tensor(piece.local), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(name, torch.Size(piece.offsets)), WriteItemType.SHARD, tensor_data=facts)


class _Pieces(DefaultSavePlanner):
    """Finds what is to be written."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__()
        self._pieces = pieces

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._pieces[write_item.index.fqn].local


class _Slices(LoadPlanner):
    """Finds what makes up the pieces that are wanted, and puts it there."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._pieces: Mapping[str, Piece] = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            saved: Any = None if self._metadata is None else self._metadata.state_dict_metadata.get(name)
            if saved is None or tuple(saved.size) != piece.shape:
                raise RuntimeError(f"it has no {name} of shape {piece.shape}")
            items += create_read_items_for_chunk_list(name, saved, [_chunk(piece)])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise RuntimeError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._pieces[read_item.dest_index.fqn].local
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was copied into what ``resolve_tensor`` gave, in place."""


def _os_error_beneath(error: BaseException) -> OSError | None:
    """What the system said first, under all that was said since."""
    unseen = [error]
    while unseen:
        seen = unseen.pop()
        if isinstance(seen, OSError):
            return seen
        unseen += [beneath for beneath in (seen.__cause__, seen.__context__) if beneath is not None]
        if isinstance(seen, CheckpointException):
            unseen += [failure for failure, _ in seen.failures.values()]
    return None
