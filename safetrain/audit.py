"""The replica audit: now and then all ranks compare fingerprints of what must be the same on each of them.

DDP makes replicas equal once, and from then on only gives them equal gradients. Whatever else changes a parameter, an
optimizer's state or a learning rate on one rank stays there without a word, and the ranks train different models.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from safetrain.comm import Comm
from safetrain.errors import RanksDiffer
from safetrain.pieces import is_shard
from safetrain.precision import Precision
from safetrain.words import ranks_in_words

_CHUNK = {"cpu": 1 << 17}  # elements whose integers stay in a CPU's cache (0.9 ms a MB, against 3.3 ms without), ...
_LARGE_CHUNK = 1 << 22  # ... and that bound what a device needs for them to 64 MB
_NAMED = 3
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaAudit:
    """Compares parameters, buffers, optimizer state, hyperparameters and the loss scale between ranks.

    What a normalisation layer keeps, and every buffer that has changed on all ranks since the last audit, may differ:
    running statistics do, in a healthy run.
    """

    def __init__(
        self, model: nn.Module, optimizers: Mapping[str, Optimizer], precision: Precision, comm: Comm, every_steps: int
    ) -> None:
        self._model, self._optimizers, self._precision, self._comm = model, optimizers, precision, comm
        self._every_steps = every_steps if comm.world_size > 1 else 0
        self._last_step: int | None = None
        self._before: dict[str, object] = {}  # fingerprints at the last audit

    def window(self, step: int) -> None:
        """After window ``step``; all ranks call it. See ``run``."""
        if self._every_steps and step % self._every_steps == 0:
            self.run(step)

    def run(self, step: int) -> None:
        """Compare now, unless the audit is off or has just been here.

        Raises:
            RanksDiffer: on all ranks; naming rank, parameter and the steps between which it happened.
        """
        if not self._every_steps or step == self._last_step:
            return
        found = self._fingerprints()
        if len(set(self._comm.gather(zlib.crc32(repr(found).encode())))) > 1:
            changed = {name for name, value in found.items() if value != self._before.get(name)}
            values, changes = zip(*self._comm.gather((found, changed)), strict=True)
            if different := _different(values, changes):
                odd = {
                    name: _odd_ones(of_ranks, [name in of_rank for of_rank in changes])
                    for name, of_ranks in different.items()
                }
                raise RanksDiffer(self._tell(step, different, odd), step=step, ranks=sorted(set().union(*odd.values())))
        self._last_step, self._before = step, found

    def _fingerprints(self) -> dict[str, object]:
        """One comparable value a thing; tensors are read from the device all at once."""
        tensors = dict(_tensors(self._model, self._optimizers))
        prints = [fingerprint(tensor) for tensor in tensors.values()]
        devices = {p.device for p in prints}
        read = {d: iter(torch.stack([p for p in prints if p.device == d]).tolist()) for d in devices}
        found: dict[str, object] = dict(_hyperparameters(self._optimizers))  # first what moves the rest
        if self._precision.scaler is not None:
            found["loss scale"] = self._precision.scaler.get_scale()
        found.update((name, tuple(next(read[p.device]))) for name, p in zip(tensors, prints, strict=True))
        return found

    def _tell(self, step: int, different: Mapping[str, Sequence[object]], odd: Mapping[str, Sequence[int]]) -> str:
        named = list(different)[:_NAMED]
        lines = [
            f"  {self._who_differs(odd[name])} in {name}: {self._how_far(name, different[name])}" for name in named
        ]
        if len(different) > _NAMED:
            lines.append(f"  and in {len(different) - _NAMED} more: {', '.join(list(different)[_NAMED:][:8])}")
        since = "before step 0" if self._last_step is None else f"between steps {self._last_step} and {step}"
        return "\n".join([
            f"the ranks' replicas are not the same any more; they drifted apart {since}:",
            *lines,
            "Something changed them on some ranks only: look for code that depends on the rank and writes to a "
            "parameter, a buffer, the optimizer or its param_groups (a learning rate from each rank's own validation "
            "loss, an assignment to .data, a checkpoint that one rank loaded). audit.every_steps narrows the steps.",
        ])  # fmt: skip

    def _who_differs(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return f"{ranks_in_words(range(self._comm.world_size))} differ"
        return f"{ranks_in_words(ranks)} {'differs' if len(ranks) == 1 else 'differ'} from the others"

    def _how_far(self, name: str, values: Sequence[object]) -> str:
        """Each rank's value; of a tensor, its largest distance from rank 0's."""
        tensor = dict(_tensors(self._model, self._optimizers)).get(name)
        shapes = self._comm.gather(None if tensor is None else tensor.shape)
        if tensor is None or len(set(shapes)) > 1:
            return _by_value([str(value) for value in values])
        of_rank_0 = tensor.detach().clone()
        self._comm.broadcast_tensors([of_rank_0])
        distances = self._comm.gather(float((tensor.detach().double() - of_rank_0.double()).abs().max()))
        furthest = max(range(len(distances)), key=lambda rank: (math.isnan(distances[rank]), distances[rank]))
        return f"by up to {distances[furthest]:.3g} (rank 0 against rank {furthest})"


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two int64 on the tensor's device: the sum of its bits as integers, and of their squares, modulo 2**64."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for chunk in flat.contiguous().view(_BITS[flat.element_size()]).split(_CHUNK.get(tensor.device.type, _LARGE_CHUNK)):
        bits = chunk.to(torch.int64)
        sums += torch.stack([bits.sum(), (bits * bits).sum()])
    return sums


def _tensors(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that replicas share, by name; not what is sharded over ranks by design."""
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer_name, optimizer in optimizers.items():
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            continue
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and _is_replica(value):
                    yield f"{optimizer_name}'s {key} of {names.get(id(parameter), 'a parameter')}", value
    for name, weight in model.named_parameters():
        if _is_replica(weight):
            yield f"parameter {name}", weight
    statistics = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers(recurse=False)}
    for name, buffer in model.named_buffers():
        if id(buffer) not in statistics and _is_replica(buffer):
            yield f"buffer {name}", buffer


def _hyperparameters(optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, str]]:
    for optimizer_name, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key not in ("params", "param_names") and not callable(value):
                    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                    yield f"{optimizer_name}'s {key} (param_groups[{index}])", repr(plain)


def _is_replica(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not is_shard(tensor)


def _different(found: Sequence[Mapping[str, object]], changed: Sequence[set[str]]) -> dict[str, list[object]]:
    """What is not the same on all ranks, and must be, with each rank's value."""
    names = dict.fromkeys(name for of_rank in found for name in of_rank)
    values = {name: [of_rank.get(name, "nothing") for of_rank in found] for name in names}
    return {
        name: of_ranks
        for name, of_ranks in values.items()
        if len(set(of_ranks)) > 1 and not (name.startswith("buffer ") and all(name in of_rank for of_rank in changed))
    }


def _odd_ones(values: Sequence[object], changed: Sequence[bool]) -> list[int]:
    """The ranks that hold something else than most, or alone have changed it; none where neither tells."""
    (common, count), *_ = Counter(values).most_common()
    if 2 * count > len(values):
        return [rank for rank, value in enumerate(values) if value != common]
    return [] if all(changed) else [rank for rank, yes in enumerate(changed) if yes]


def _by_value(values: Sequence[str]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        sides.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in sides.items())
