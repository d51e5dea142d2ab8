"""``python -m safetrain.export CHECKPOINT FILE``: a checkpoint's weights in a file of their own, with plain names.

    python -m safetrain.export outputs/resnet_ddp/2026-11-29_23-15-58 model.safetensors
    python -m safetrain.export outputs/resnet_ddp/2026-11-29_23-15-58/checkpoints/best model.pt

CHECKPOINT is one, or a run, for the newest good one in it. ``model.load_state_dict`` takes what is in FILE, without
safetrain: ``torch.load("model.pt")``, or ``safetensors.torch.load_file("model.safetensors")``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from safetrain import archive
from safetrain.checkpoint import find
from safetrain.durable import sync
from safetrain.errors import CheckpointError, UsageError
from safetrain.safetensors import write_safetensors

_MODEL = "model"
_WRITERS: Mapping[str, Callable[[Mapping[str, torch.Tensor], Path], None]] = {
    ".safetensors": write_safetensors,
    ".pt": lambda weights, path: torch.save(dict(weights), path),
}


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    about, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "python -m safetrain.export", description=about, epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the directory of a run")
    parser.add_argument("file", type=Path, help=f"what to write; its name ends in {' or '.join(_WRITERS)}")
    given = parser.parse_args(arguments)
    try:
        print(export(given.checkpoint, given.file))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def export(checkpoint: Path, file: Path) -> str:
    """Write the weights, whole or not at all; returns what there is to say about it.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        UsageError: ``file`` is of a kind that is not written here.
    """
    if file.suffix not in _WRITERS:
        raise UsageError(f"{file}: the name must end in {' or '.join(_WRITERS)}")
    path, manifest = find(checkpoint)
    weights = archive.read_part(path, _MODEL)
    draft = file.with_name(f".{file.name}.writing")
    try:
        _WRITERS[file.suffix](weights, draft)
        sync(draft)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    values = sum(tensor.numel() for tensor in weights.values())
    return f"{file}: {len(weights)} tensors, {values:,} values, of step {manifest.step} ({path})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
