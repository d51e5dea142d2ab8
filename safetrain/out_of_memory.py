"""Who held the memory when there was none left: parameters, gradients, optimizer states, and what the code was at.

A table in the run directory, and on a GPU the allocator's own snapshot beside it (https://pytorch.org/memory_viz).
``torch.cuda.memory._snapshot`` is private to torch; there in 2.13 (tests/unit/test_memory.py tells of another).
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from safetrain.activity import ACTIVITY
from safetrain.contain import is_out_of_memory
from safetrain.finding import size
from safetrain.memory import resident_bytes
from safetrain.pieces import bytes_here, is_shard

FOLDER = "memory"
_ROWS = 30


class Held(NamedTuple):
    """One tensor, or several of one owner."""

    kind: str
    name: str
    bytes: int
    what: str  # shape and dtype


class Census:
    """Tells who holds this rank's memory, once it is out of it."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], run_dir: Path | None, rank: int) -> None:
        self._model, self._optimizers, self._run_dir, self._rank = model, optimizers, run_dir, rank
        self._told: BaseException | None = None

    def tell(self, error: BaseException) -> str:
        """Write the table; in a few words, what is the largest, and where the table is. Call it while the traceback's
        frames still hold what they hold."""
        self._told = error
        try:
            held = [*owners(self._model, self._optimizers), *in_frames(error)]
            largest = max(held, key=lambda one: one.bytes, default=None)
            said = f"; the largest tensor is {largest.name} ({largest.kind}), {size(largest.bytes)}" if largest else ""
            if self._run_dir is not None:
                path = self._path(self._rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(table(held, self._rank, str(error)))
                if torch.cuda.is_initialized():
                    path.with_suffix(".pickle").write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
                said += f"; all of them: {FOLDER}/{path.name}"
        except (OSError, MemoryError, RuntimeError) as obstacle:  # there may be no memory for this, too
            return f"; who held the memory can't be told ({type(obstacle).__name__})"
        return said

    def where(self, reason: str, rank: int | None) -> str:
        """For the message with which all ranks stop: where the table of the rank in trouble is."""
        if reason != "out of memory" or rank is None or self._run_dir is None:
            return ""
        return f" Who held the memory: {self._path(rank)}"

    @contextmanager
    def on_the_way_out(self) -> Iterator[None]:
        """Tell it of an error that no window has caught, such as an optimizer's first step, which takes its states."""
        try:
            yield
        except Exception as error:
            root = error.__cause__ or error
            if is_out_of_memory(root) and root is not self._told:
                root.add_note(f"Out of memory{self.tell(root)}")
            raise

    def _path(self, rank: int) -> Path:
        assert self._run_dir is not None
        return self._run_dir / FOLDER / f"out_of_memory_rank_{rank}.txt"


def owners(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> list[Held]:
    """Tensors of the model and its optimizers, by name."""
    held, names = [], {}
    for name, weight in model.named_parameters():
        names[id(weight)] = name
        held.append(_held("parameter", name, weight))
        if weight.grad is not None:
            held.append(_held("gradient", name, weight.grad))
    held += [_held("buffer", name, buffer) for name, buffer in model.named_buffers()]
    for optimizer in optimizers.values():
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "?")
            held += [_held("optimizer", f"{name}.{k}", v) for k, v in state.items() if isinstance(v, torch.Tensor)]
    return held


def in_frames(error: BaseException) -> list[Held]:
    """Tensors in the variables of the frames that an exception came through: activations and batches, for the most."""
    held, seen = [], set()
    for frame, line in traceback.walk_tb(error.__traceback__):
        for name, value in frame.f_locals.items():
            for part, tensor in _tensors(name, value):
                if id(tensor) not in seen and not isinstance(tensor, nn.Parameter):
                    seen.add(id(tensor))
                    place = f"{Path(frame.f_code.co_filename).name}:{line}"
                    held.append(_held("variable", f"{part} at {place}", tensor))
    return held


def table(held: Sequence[Held], rank: int, message: str) -> str:
    """For people: sums by kind, and the largest tensors."""
    sums: dict[str, int] = {}
    for one in held:
        sums[one.kind] = sums.get(one.kind, 0) + one.bytes
    lines = [f"rank {rank} was out of memory in {ACTIVITY.phase}, at step {ACTIVITY.step}: {message}", ""]
    lines += [f"{kind:<10} {size(total):>9}" for kind, total in sorted(sums.items(), key=lambda one: -one[1])]
    if torch.cuda.is_initialized():
        allocated = torch.cuda.memory_allocated()
        reserved, other = torch.cuda.memory_reserved(), max(0, allocated - sum(sums.values()))
        lines.append(f"{'other':<10} {size(other):>9}  activations kept for backward, DDP's buckets")
        lines.append(f"{'device':<10} {size(allocated):>9}  allocated in all, {size(reserved)} reserved")
    lines += [f"{'process':<10} {size(resident_bytes()):>9}  of the host's memory, all in all", "", "The largest:"]
    largest = sorted(held, key=lambda one: -one.bytes)[:_ROWS]
    lines += [f"{size(one.bytes):>9}  {one.kind:<10} {one.name}  {one.what}" for one in largest]
    return "\n".join(lines) + "\n"


def _held(kind: str, name: str, tensor: torch.Tensor) -> Held:
    what = f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
    return Held(kind, name, bytes_here(tensor), f"a shard of {what}" if is_shard(tensor) else what)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A variable that is a tensor, or holds some at its first level, as batches do."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{i}]", one) for i, one in enumerate(value) if isinstance(one, torch.Tensor))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", one) for key, one in value.items() if isinstance(one, torch.Tensor))
