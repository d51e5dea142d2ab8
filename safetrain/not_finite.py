"""Where NaN or infinity is, once a run has given up on it: a weight, or else a gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from safetrain.pieces import is_shard


def not_finite(model: nn.Module) -> str:
    """A sentence for the message with which all ranks stop, the same on all of them; empty where nothing is found.

    It asks the device once for each tensor, and is for the way out only. Shards are not looked at: they differ by rank.
    """
    weights = [(name, weight) for name, weight in model.named_parameters() if not is_shard(weight)]
    if name := _first(weights):
        return f" The weights are not finite any more, the first of them {name}: no setting helps from there."
    if name := _first((name, weight.grad) for name, weight in weights if weight.grad is not None):
        return f" The first gradient that is not finite is that of {name}."
    return ""


def _first(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    return next((name for name, tensor in tensors if not bool(tensor.isfinite().all())), "")
