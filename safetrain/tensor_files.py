"""Tensors by name in the format of torch.distributed.checkpoint.

Imported when a checkpoint is first written or read, and by rank 0 alone if it is only written: that package takes as
long to import as torch itself, a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

# the tensors are one rank's alone to write, which torch takes for an accident
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors`` into ``folder``; whoever seals the files sees to it that they are on the disk, once.

    Raises:
        OSError: what the system said.
        RuntimeError: torch could not.
    """
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder, sync_files=False), no_dist=True)
    except (CheckpointException, RuntimeError) as error:
        raise _os_error_beneath(error) or RuntimeError(str(error)) from error


def read_into(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill ``tensors`` with what ``folder`` holds under their names.

    Raises:
        RuntimeError: torch could not; and what else it raises on a file that is damaged.
    """
    try:
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    except CheckpointException as error:  # no Exception
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


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
