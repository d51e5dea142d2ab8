"""The faults that ``python -m safetrain.chaos`` can put into a rank, by name.

Each is given the trainer, and whether this rank is the culprit.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.errors import SkipBatch

if TYPE_CHECKING:
    from safetrain.trainer import Trainer

_FOREVER_S = 3600


def _raise(_trainer: Trainer, _mine: bool) -> None:
    raise RuntimeError("injected by safetrain.chaos")


def _skip(_trainer: Trainer, _mine: bool) -> None:
    raise SkipBatch("injected by safetrain.chaos")


def _raise_disk_full(_trainer: Trainer, _mine: bool) -> None:
    raise OSError(28, "No space left on device")


def _run_out_of_files(_trainer: Trainer, _mine: bool) -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    Path(os.devnull).read_bytes()


def _run_out_of_memory(_trainer: Trainer, _mine: bool) -> None:
    raise MemoryError("injected by safetrain.chaos")


def _signal(number: signal.Signals, _trainer: Trainer, _mine: bool) -> None:
    os.kill(os.getpid(), number)


def _segfault(_trainer: Trainer, _mine: bool) -> None:
    ctypes.string_at(0)


def _exit(code: int, _trainer: Trainer, _mine: bool) -> None:
    os._exit(code)


def _abort(_trainer: Trainer, _mine: bool) -> None:
    os.abort()


def _sleep(seconds: float, _trainer: Trainer, _mine: bool) -> None:
    time.sleep(seconds)


def _deadlock(_trainer: Trainer, _mine: bool) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_the_interpreter(_trainer: Trainer, _mine: bool) -> None:
    ctypes.PyDLL(None).sleep(_FOREVER_S)


def _stray_collective(trainer: Trainer, mine: bool) -> None:
    if mine:
        _all_reduce(trainer)


def _other_shape(trainer: Trainer, mine: bool) -> None:
    _all_reduce(trainer, length=6 if mine else 5)


def _other_dtype(trainer: Trainer, mine: bool) -> None:
    _all_reduce(trainer, dtype="int32" if mine else "float32")


def _other_op(trainer: Trainer, mine: bool) -> None:
    _all_reduce(trainer, op="MAX" if mine else "SUM")


def _swapped_order(trainer: Trainer, mine: bool) -> None:
    for op in ("MAX", "SUM") if mine else ("SUM", "MAX"):
        _all_reduce(trainer, op=op)


def _absent_from_barrier(trainer: Trainer, mine: bool) -> None:
    if not mine:
        trainer.comm.barrier()


def _all_reduce(trainer: Trainer, length: int = 5, dtype: str = "float32", op: str = "SUM") -> None:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(length, dtype=getattr(torch, dtype), device=trainer.comm.device)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))


def _drift_parameter(trainer: Trainer, _mine: bool) -> None:
    next(iter(trainer.model.parameters())).data.add_(1e-3)


def _drift_buffer(trainer: Trainer, _mine: bool) -> None:
    next(buffer for buffer in trainer.model.buffers() if buffer.is_floating_point()).add_(1e-3)


def _drift_optimizer(trainer: Trainer, _mine: bool) -> None:
    for state in next(iter(trainer.optimizers.values())).state.values():
        for value in state.values():
            if hasattr(value, "add_"):
                value.add_(1e-3)


def _drift_learning_rate(trainer: Trainer, _mine: bool) -> None:
    next(iter(trainer.optimizers.values())).param_groups[0]["lr"] *= 1.01


_SENT = (
    "sigkill", "sigterm", "sigint", "sighup", "sigbus", "sigfpe", "sigstop",
)  # fmt: skip
_COLLECTIVES: dict[str, Callable[[Trainer, bool], None]] = {
    "stray_collective": _stray_collective,
    "other_shape": _other_shape,
    "other_dtype": _other_dtype,
    "other_op": _other_op,
    "swapped_order": _swapped_order,
    "absent_from_barrier": _absent_from_barrier,
}
ON_ALL_RANKS = frozenset(_COLLECTIVES)
"""The culprit does one thing, the others another."""

FAULTS: dict[str, Callable[[Trainer, bool], None]] = {
    "raise": _raise,
    "skip": _skip,
    "disk_full": _raise_disk_full,
    "too_many_files": _run_out_of_files,
    "out_of_memory": _run_out_of_memory,
    "exit": partial(_exit, 3),
    "exit_0": partial(_exit, 0),
    "sigsegv": _segfault,
    "abort": _abort,
    **{name: partial(_signal, signal.Signals[name.upper()]) for name in _SENT},
    "stuck": partial(_sleep, _FOREVER_S),
    "lock": _deadlock,
    "gil": _hold_the_interpreter,
    "slow": partial(_sleep, 3),
    **_COLLECTIVES,
    "drift_parameter": _drift_parameter,
    "drift_buffer": _drift_buffer,
    "drift_optimizer": _drift_optimizer,
    "drift_learning_rate": _drift_learning_rate,
}
"""Everything that ``fault=`` may name."""
