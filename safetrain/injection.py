"""How a fault gets into a rank of any recipe: it strikes ``at`` a place of the user's own code.

``python -m safetrain.chaos`` asks for one; each rank finds it in its environment. The fault strikes at the first line
of the user's code that runs at that place, so that it looks in every stack as if the user had written it there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetrain.checks import nearest
from safetrain.errors import ConfigError
from safetrain.faults import FAULTS, ON_ALL_RANKS

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from safetrain.trainer import Trainer

ENVIRONMENT = "SAFETRAIN_CHAOS"
LAUNCHER = "launcher"
"""The place that is no rank: the rank only tells when the time has come, and chaos sends the launcher a signal."""

_METHODS = (
    "training_step", "validation_step", "on_epoch_start", "on_train_end", "build_model", "build_train_data",
    "build_optimizers",
)  # fmt: skip
PLACES = (*_METHODS, "rank_zero", "dataset", "collate", "backward", "optimizer", LAUNCHER)


_TRIAL = "This was a trial (safetrain.chaos): go on with a run of your own, not with this one."


def marked_as_trial(text: str) -> str:
    """What is said at a job's end; where it says how to go on, with a word against going on with a trial."""
    if ENVIRONMENT not in os.environ or "resume=auto" not in text or _TRIAL in text:
        return text
    return f"{text.rstrip()}\n\n{_TRIAL}\n"


@dataclass(frozen=True)
class Fault:
    """What happens, where, on which rank (-1: the last), from which step on.

    Attributes:
        note: a file that is written when the fault strikes; it strikes once.
    """

    what: str
    at: str
    rank: int
    step: int
    note: str = ""

    def __post_init__(self) -> None:
        for key, value, allowed in (("fault", self.what, sorted(FAULTS)), ("at", self.at, PLACES)):
            if value not in allowed:
                names = ", ".join(allowed)
                raise ConfigError(f"{key}={value}: no such choice.{nearest(value, allowed)} Allowed: {names}.")
        if self.at == LAUNCHER and not hasattr(signal, self.what.upper()):
            raise ConfigError(f"fault={self.what}: at={LAUNCHER} takes a signal, such as sigint, sigterm or sigkill")

    def to_environment(self) -> dict[str, str]:
        """What a rank needs to find this fault."""
        return {ENVIRONMENT: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self | None:
        """The fault that this process was started with."""
        text = os.environ.get(ENVIRONMENT)
        return None if text is None else cls(**json.loads(text))


def inject(fault: Fault, trainer: Trainer, rank: int, world_size: int) -> None:
    """Put ``fault`` into ``trainer``, before its ``fit``. Loader processes have to be forked ones."""
    culprit = fault.rank % world_size
    if rank != culprit and fault.what not in ON_ALL_RANKS:
        return
    trigger = _Trigger(fault, trainer, mine=rank == culprit)
    if fault.at in _METHODS:
        setattr(trainer, fault.at, partial(trigger.call, getattr(trainer, fault.at)))
    elif fault.at == "rank_zero":
        trainer.rank_zero = partial(_section, trainer.rank_zero, trigger)  # type: ignore[method-assign]
    elif fault.at == "optimizer":
        trainer.build_optimizers = partial(_with_step_hook, trainer.build_optimizers, trigger)  # type: ignore[method-assign]
    elif fault.at == "backward":
        trainer.build_model = partial(_with_gradient_hook, trainer.build_model, trigger)  # type: ignore[method-assign]
    elif fault.at in ("dataset", "collate"):
        from safetrain import data

        data.build_loader = partial(_build_loader, data.build_loader, trigger, fault.at)
    trainer.training_step = partial(trigger.watch_step, trainer.training_step)  # type: ignore[method-assign]


class _Trigger:
    """Strikes once, when the step has come. A loader process learns of the step from shared memory."""

    def __init__(self, fault: Fault, trainer: Trainer, *, mine: bool) -> None:
        import torch

        self._fault, self._trainer, self._mine = fault, trainer, mine
        self._due = torch.zeros((), dtype=torch.bool).share_memory_()
        if fault.at.startswith("build_"):
            self._due.fill_(True)
        self._struck = False

    def watch_step(self, training_step: Callable[[Any], Any], batch: Any) -> Any:
        """The user's step, which tells how far training is."""
        if self._trainer.step >= self._fault.step:
            self._due.fill_(True)
        if self._fault.at == LAUNCHER:
            self.strike()
        return training_step(batch)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``; when the time has come, the fault strikes at the first line of user code in it."""
        if self._struck or not self._due:
            return function(*args)
        from safetrain.failure import is_user_file

        def on_call(frame: Any, _event: str, _arg: Any) -> Any:
            return None if self._struck or not is_user_file(frame.f_code.co_filename) else on_line

        def on_line(frame: Any, event: str, _arg: Any) -> Any:
            if event == "line" and not self._struck:
                sys.settrace(None)
                self._strike(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return on_line

        sys.settrace(on_call)
        try:
            result = function(*args)
        finally:
            sys.settrace(None)
        self.strike()  # no user code ran
        return result

    def strike(self, *_: Any) -> None:
        """Strike here and now, if the time has come."""
        if self._due and not self._struck:
            self._strike()

    def _strike(self, place: str = "") -> None:
        self._struck = True
        if self._mine and not self._claim(place):
            return
        if self._fault.at != LAUNCHER:
            FAULTS[self._fault.what](self._trainer, self._mine)

    def _claim(self, place: str) -> bool:
        """Write the note; False where another process of this rank was first."""
        facts = {"monotonic_s": time.monotonic(), "place": place, "pid": os.getpid()}
        partial_note = Path(f"{self._fault.note}.{os.getpid()}")
        partial_note.write_text(json.dumps({**facts, "run_dir": str(self._trainer.run_dir)}))
        try:
            os.link(partial_note, self._fault.note)
        except FileExistsError:
            return False
        return True


@contextmanager
def _section(section: Callable[..., Any], trigger: _Trigger, *args: Any, **kwargs: Any) -> Iterator[bool]:
    with section(*args, **kwargs) as mine:
        if mine:
            trigger.strike()
        yield mine


def _with_step_hook(build: Callable[[], dict[str, Any]], trigger: _Trigger) -> dict[str, Any]:
    optimizers = build()
    for optimizer in optimizers.values():
        optimizer.register_step_pre_hook(trigger.strike)
    return optimizers


def _with_gradient_hook(build: Callable[[], Any], trigger: _Trigger) -> Any:
    model = build()
    next(parameter for parameter in model.parameters() if parameter.requires_grad).register_hook(trigger.strike)
    return model


def _build_loader(build: Callable[..., DataLoader[Any]], trigger: _Trigger, at: str, *args: Any, **kwargs: Any) -> Any:
    loader = build(*args, **kwargs)
    if kwargs["train"] and at == "collate":
        loader.collate_fn = partial(trigger.call, loader.collate_fn)
    elif kwargs["train"]:
        from torch.utils.data import IterableDataset

        share: Any = type(loader.dataset)
        stream = isinstance(loader.dataset, IterableDataset)  # its class has a __getitem__, too, which nobody calls
        watched = {
            "__iter__": lambda self: _Watched(trigger, share.__iter__(self)),
            "__getitem__": lambda *a: trigger.call(share.__getitem__, *a),
        }
        name = "__iter__" if stream else "__getitem__"
        # of the class, since that is where Python looks for it; a class of its own, since there is a validation loader
        loader.dataset.__class__ = type(share.__name__, (share,), {name: watched[name]})
    return loader


class _Watched(Iterator[Any]):
    """A stream's items; the fault strikes while one of them is read."""

    def __init__(self, trigger: _Trigger, items: Iterator[Any]) -> None:
        self._trigger, self._items = trigger, items

    def __next__(self) -> Any:
        return self._trigger.call(next, self._items)
