"""The schema of a run: every key, its type, its unit, and the checks that need no process.

``Config.parse`` turns the plain data that Hydra composed into checked dataclasses. A ConfigError names the key, the value,
what is allowed, and the nearest valid name. This module imports neither torch nor Hydra: a typo is answered at once.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, Self, Union, get_args, get_origin

from safetrain.errors import ConfigError

Node = Mapping[str, Any]
"""A mapping with a ``_target_``: something that ``hydra.utils.instantiate`` builds."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long, and how, to train."""

    epochs: int = 1
    max_steps: int | None = None
    """Optimizer steps after which training ends, wherever it is in an epoch."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    clip_norm: float | None = None
    """Largest gradient norm (over all parameters of an optimizer)."""
    clip_value: float | None = None
    """Largest absolute value of a gradient's element."""
    log_every_steps: int = 10
    validate_every_epochs: int = 1
    nominal_weight: int | None = None
    """Weight (samples or tokens) of one full micro-batch; by default the loader's batch size."""

    def __post_init__(self) -> None:
        _check_types(self, "loop")
        _at_least(self, "loop", 0, "epochs")
        _at_least(self, "loop", 1, "max_steps", "accumulate", "log_every_steps", "validate_every_epochs", "nominal_weight")
        _positive(self, "loop", "clip_norm", "clip_value")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError("loop.clip_norm and loop.clip_value are both set: keep one, set the other to null")


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How batches are read; sizes are per rank."""

    batch_size: int = 32
    val_batch_size: int | None = None
    """By default ``batch_size``."""
    num_workers: int = 0
    """Loader processes per rank."""
    shuffle: bool = True
    drop_last: bool = True
    pin_memory: bool = False
    prefetch_factor: int | None = None
    """Batches that each loader process reads ahead; needs num_workers > 0."""
    persistent_workers: bool = True
    """Keep loader processes between epochs (used only with num_workers > 0)."""
    timeout_s: float = 0
    """Longest wait for a batch from a loader process; 0 waits for ever."""

    def __post_init__(self) -> None:
        _check_types(self, "loader")
        _at_least(self, "loader", 1, "batch_size", "val_batch_size", "prefetch_factor")
        _at_least(self, "loader", 0, "num_workers", "timeout_s")
        if self.prefetch_factor is not None and self.num_workers == 0:
            raise ConfigError(
                f"loader.prefetch_factor={self.prefetch_factor} needs loader processes: set loader.num_workers >= 1, "
                "or loader.prefetch_factor=null"
            )


def nearest(name: str, valid: Iterable[str]) -> str:
    """``" Did you mean x?"``, or an empty string where nothing is near."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" Did you mean {match[0]}?" if match else ""


def _check_types(section: Any, where: str) -> None:
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        if not _fits(value, hint):
            raise ConfigError(f"{_join(where, name)}={value!r}: must be {_describe(hint)}, not {_kind(value)}")


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in get_args(hint))
    if origin is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in get_args(hint))
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(member) for member in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def _kind(value: object) -> str:
    return {
        int: "a whole number", float: "a fraction", bool: "true or false", str: "text", type(None): "null",
        dict: "a mapping", list: "a list",
    }.get(type(value), type(value).__name__)  # fmt: skip


def _at_least(section: Any, where: str, least: int, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{_join(where, name)}={value}: must be at least {least}")


def _positive(section: Any, where: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{_join(where, name)}={value}: must be more than 0")


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
