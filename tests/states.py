"""State as a run has it, for the tests of checkpoints."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import HashStore

from safetrain import archive, tree
from safetrain.shelf import Keep, Shelf
from safetrain.snapshot import Snapshot
from safetrain.writer import Job, Writer


def shared_state(step: int, width: int = 8) -> dict[str, Any]:
    """Different for each step; of every kind that a checkpoint can hold."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizers": {"optimizer": optimizer.state_dict()},
        "precision": {"scale": 65536.0, "growth_tracker": step},
        "odd": OrderedDict(
            [((1, "a"), [torch.tensor(3.5, dtype=torch.bfloat16), {"x"}]), ("empty", torch.empty(0, 3))]
        ),
        "a": {"b.c": torch.tensor([step])},
        "a.b": {"c": torch.tensor([-step])},
        "nothing": {"none": None, "empty": {}, "list": []},
    }


def own_state(step: int, rank: int) -> dict[str, Any]:
    generator = np.random.default_rng(step)
    return {
        "rank": rank,
        "torch": torch.Generator().manual_seed(step + rank).get_state(),
        "python": random.Random(step + rank).getstate(),
        "numpy": np.random.RandomState(step + rank).get_state(),
        "scalars": [generator.random(), np.int64(step), np.float32(0.1), np.bool_(True)],
        "arrays": [generator.random((2, 3)), np.arange(3), np.array(["a", "bc"])],
    }


def snapshot(step: int, rank: int = 0, width: int = 8) -> Snapshot:
    return Snapshot(step, step // 10, shared_state(step, width), own_state(step, rank), f"name: step {step}\n")


def checkpoint_at(
    folder: Path,
    step: int,
    *,
    shared: dict[str, Any] | None = None,
    keep: Keep | None = None,
    metric: float | None = None,
) -> Path:
    """Write a checkpoint of one rank, in this thread."""
    structure, pieces = tree.split(shared_state(step) if shared is None else shared)
    job = Job(step, step // 10, metric, f"name: step {step}\n", structure, pieces, own_state(step, 0))
    writer = Writer(Shelf(folder, keep), HashStore(), 0, 1, timeout_s=60)
    writer.start(job)
    outcome = writer.wait(60)
    assert outcome is not None
    assert not outcome.error, outcome.error
    return Path(outcome.path)


def write_state(folder: Path, state: Any) -> None:
    """What all ranks share, written by one."""
    structure, pieces = tree.split(state)
    _, index = archive.write_pieces(folder, 0, pieces)
    archive.write_shared(folder, structure, [index])


def assert_equal(one: Any, other: Any, where: str = "state") -> None:
    """The same types, the same values bit for bit, the same order of keys."""
    assert type(one) is type(other), f"{where}: {type(one)} and {type(other)}"
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), where
        assert torch.equal(one, other), where
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
        assert_equal(getattr(one, "_metadata", None), getattr(other, "_metadata", None), f"{where}._metadata")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_equal(mine, theirs, f"{where}[{index}]")
    else:
        assert one == other, where
