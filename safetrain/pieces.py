"""What a rank has of a tensor that a checkpoint holds: all of it, or a piece of it where it lies on several ranks.

A shard is told by what torch's DTensor says of itself, so that nobody who has none waits for its import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from safetrain.errors import UsageError


@dataclass(frozen=True)
class Piece:
    """
    Attributes:
        local: what this rank has.
        offsets: where it begins in the tensor.
        shape: of the tensor.
        part: the tensor lies on several ranks.
        again: ... and another one, which writes it, has the same of it.
    """

    local: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    part: bool = False
    again: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str = "a tensor") -> Self:
        """
        Raises:
            UsageError: it is divided in a way that is not known here.
        """
        if not is_shard(tensor):
            return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        shard: Any = tensor
        offsets, again = [0] * tensor.dim(), False
        divided: set[int] = set()
        for dimension, placement in enumerate(shard.placements):
            rank, ranks = shard.device_mesh.get_local_rank(dimension), shard.device_mesh.size(dimension)
            if placement.is_replicate():
                again = again or rank > 0
                continue
            along: int = getattr(placement, "dim", -1)
            if type(placement).__name__ != "Shard" or along in divided:
                raise UsageError(f"a checkpoint can't hold {name}: it is divided over ranks as {shard.placements}")
            divided.add(along)
            share = -(-tensor.shape[along] // ranks)  # the last ranks may have less, or nothing
            offsets[along] = min(rank * share, tensor.shape[along])
        return cls(shard.to_local(), tuple(offsets), tuple(tensor.shape), part=True, again=again)

    def written_by(self, rank: int) -> bool:
        """Whether it is this rank's to write; what all have is rank 0's."""
        return not self.again if self.part else rank == 0


def is_shard(tensor: object) -> bool:
    """Whether this is one rank's view of a tensor that lies on several."""
    return hasattr(tensor, "device_mesh")


def bytes_here(tensor: torch.Tensor) -> int:
    """What this rank holds of it."""
    shard: Any = tensor
    local: torch.Tensor = shard.to_local() if is_shard(tensor) else tensor
    return local.nbytes
