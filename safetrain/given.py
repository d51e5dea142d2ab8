"""What a script gave to Trainer, looked at before anything is made of it: a word of the config (``precision=bf16``) is
the name of an object, and a script gives the object itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.config import Audit, Checkpoint, Loader, Loop, Preflight, Watchdog
from safetrain.errors import UsageError
from safetrain.observer import Observer
from safetrain.policies import Policies
from safetrain.precision import Precision

if TYPE_CHECKING:
    from safetrain.trainer import Trainer

_OBJECTS: dict[str, tuple[type, str]] = {
    "loop": (Loop, "safetrain.Loop(epochs=3)"),
    "loader": (Loader, "safetrain.Loader(batch_size=64)"),
    "precision": (Precision, "safetrain.BF16()"),
    "policies": (Policies, "safetrain.Policies(skip=safetrain.policies.SkipPartial())"),
    "watchdog": (Watchdog, "safetrain.Watchdog(stall_s=120)"),
    "audit": (Audit, "safetrain.Audit(every_steps=100)"),
    "preflight": (Preflight, "safetrain.Preflight(deep=True)"),
    "checkpoint": (Checkpoint, "safetrain.Checkpoint(every_steps=1000)"),
}
_PLAIN: dict[str, tuple[tuple[type, ...], str, str]] = {
    "resume": ((str, Path), "auto, none or a path", '"auto"'),
    "seed": ((int,), "a whole number", "1"),
    "device": ((str,), "auto, cpu or cuda, as text", '"cpu"'),
    "name": ((str,), "text", '"mine"'),
}
_BY_WORD = {
    "fp32": "safetrain.FP32()", "bf16": "safetrain.BF16()", "fp16": "safetrain.FP16()",
    "ddp": "safetrain.DDPStrategy()", "fsdp": "safetrain.FSDPStrategy()", "single": "safetrain.SingleStrategy()",
}  # fmt: skip
_CHOICES = ("precision", "strategy", "preflight", "observers")  # of the config
_STRATEGY = ("check_ranks", "prepare", "reduce")
_OBSERVER = ("start", "step", "event", "close")
_POLICIES = {  # what each must have, and one of them
    "skip": ("drops", "SkipPartial"),
    "uneven": ("ends_epoch", "UnevenContinue"),
    "non_finite": ("max_consecutive", "NonFiniteStop"),
    "out_of_memory": ("max_consecutive", "OutOfMemoryStop"),
    "unused": ("stops", "UnusedStop"),
}
_OBSERVERS = "[ProgressBar(), TensorBoard(), EventLog()], all three from safetrain.telemetry"


def check_given(trainer: Trainer, unwritten: object) -> None:
    """``unwritten``: the ``training_step`` of a class that has none.

    Raises:
        UsageError: what was given, what is expected, and how it is written.
    """
    if type(trainer).training_step is unwritten:
        raise UsageError(f"{type(trainer).__name__} has no training_step(self, batch): write one that returns the loss")
    for name, (kind, example) in _OBJECTS.items():
        if not isinstance(value := getattr(trainer, name), kind):
            expected = "a precision" if kind is Precision else f"a safetrain.{kind.__name__}"
            raise _wrong(name, value, expected, _for(value, kind.__name__, example))
    for name, (kinds, expected, example) in _PLAIN.items():
        if not isinstance(value := getattr(trainer, name), kinds) or isinstance(value, bool):
            raise _wrong(name, value, expected, example)
    if not _has(trainer.strategy, *_STRATEGY):
        example = _for(trainer.strategy, "DDPStrategy", "safetrain.FSDPStrategy()")
        raise _wrong("strategy", trainer.strategy, "a strategy", example)
    for name, (member, one) in _POLICIES.items():
        if not _has(value := getattr(trainer.policies, name), member):
            raise _wrong(f"policies.{name}", value, "a policy", f"safetrain.policies.{one}()")


def observers_of(given: Iterable[Observer]) -> tuple[Observer, ...]:
    """
    Raises:
        UsageError: these are no observers.
    """
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise _wrong("observers", given, "a list of observers", _OBSERVERS)
    observers = tuple(given)
    for one in observers:
        if not _has(one, *_OBSERVER):
            raise _wrong("observers", [one], "a list of observers", _OBSERVERS)
    return observers


def as_path(run_dir: str | Path | None) -> Path | None:
    """
    Raises:
        UsageError: it is no path.
    """
    if run_dir is None or isinstance(run_dir, (str, Path)):
        return None if run_dir is None else Path(run_dir)
    raise _wrong("run_dir", run_dir, "a path", '"outputs/mine"')


def _has(value: object, *names: str) -> bool:
    """Whether it is an object, not a class, with all of these."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _for(value: object, kind: str, example: str) -> str:
    """What was meant, if that can be told, else ``example``."""
    if isinstance(value, str):
        return _BY_WORD.get(value, example)
    if isinstance(value, type):
        return f"{value.__name__}()"
    if isinstance(value, dict):
        return f"safetrain.{kind}({', '.join(f'{key}={one!r}' for key, one in value.items())})"
    return example


def _wrong(name: str, value: object, expected: str, example: str) -> UsageError:
    choice = isinstance(value, str) and name in _CHOICES
    word = f"{name}={value} is how a config and the command line say it. " if choice else ""
    return UsageError(f"{name}={value!r}: must be {expected}. {word}In a script: {name.rpartition('.')[2]}={example}")
