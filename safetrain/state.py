"""The parts of a run's state: what each saves, and how a new process takes it over, exactly or with an error that says
which part does not fit.

``shared`` parts are the same on every rank; of ``own`` parts each rank has its own, and the ranks that load them may be
fewer or more than those that saved.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from safetrain.errors import CheckpointError, UsageError
from safetrain.metrics import MetricLog
from safetrain.precision import Precision
from safetrain.words import names_in_words

logger = logging.getLogger("safetrain")


class SharedPart(Protocol):
    """A part that is the same on every rank."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> None: ...


class OwnPart(Protocol):
    """A part that each rank has for itself."""

    def state_dict(self) -> Any: ...
    def load_state_dicts(self, states: Sequence[Any], world_size: int, /) -> None:
        """``states``: of all ranks of the run that saved; ``world_size``: ranks there are now."""


@dataclass(frozen=True)
class RunState:
    """All parts of a run, by name; they are loaded in this order."""

    shared: Mapping[str, SharedPart]
    own: Mapping[str, OwnPart]

    def save_shared(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.shared.items()}

    def save_own(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.own.items()}

    def load_shared(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where a part is missing, is extra, or does not fit."""
        check_names("the checkpoint", state, self.shared)
        for name, part in self.shared.items():
            part.load_state_dict(state[name])

    def load_own(self, states: Sequence[Mapping[str, Any]], world_size: int) -> None:
        """``states`` by rank of the run that saved. Raises CheckpointError as ``load_shared`` does."""
        for rank, state in enumerate(states):
            check_names(f"the checkpoint's part of rank {rank}", state, self.own)
        for name, part in self.own.items():
            part.load_state_dicts([state[name] for state in states], world_size)


# --- shared ---------------------------------------------------------------------------------------------------------


class ModelState:
    """Weights and persistent buffers under the model's own names, all of them and of the right kind."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return self._model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_tensors("model", state, self._model.state_dict())
        self._model.load_state_dict(state)


class FrozenState:
    """Which parameters do not train: torch's ``state_dict`` does not say, and code of an earlier epoch may have done
    it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> list[str]:
        return [name for name, parameter in self._model.named_parameters() if not parameter.requires_grad]

    def load_state_dict(self, state: Sequence[str]) -> None:
        frozen = set(state)
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(name not in frozen)


class OptimizerState:
    """An optimizer's state by the names of the parameters, where torch's own goes by their order."""

    def __init__(self, name: str, optimizer: Optimizer, model: nn.Module) -> None:
        self._where, self._optimizer, self._model = f"optimizer {name!r}", optimizer, model

    def state_dict(self) -> dict[str, Any]:
        if type(self._optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UsageError(
                f"{self._where} keeps a part of its state on each rank, and checkpoints hold whole ones. Use the "
                "optimizer inside it, or switch checkpoints off: checkpoint.every_epochs, every_minutes = null, "
                "checkpoint.at_end=false"
            )
        raw, names = self._optimizer.state_dict(), self._names()
        flat = [name for group in names for name in group]
        groups = [{**group, "params": named} for group, named in zip(raw["param_groups"], names, strict=True)]
        return {"state": {flat[index]: kept for index, kept in raw["state"].items()}, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hyperparameters, such as the learning rate, are the checkpoint's from here on."""
        names = self._names()
        if len(state["param_groups"]) != len(names):
            raise CheckpointError(
                f"{self._where} has {len(names)} parameter groups, and {len(state['param_groups'])} in the checkpoint: "
                "group its parameters as the run did that saved it"
            )
        for index, (group, named) in enumerate(zip(state["param_groups"], names, strict=True)):
            check_names(f"{self._where}, group {index}, of the checkpoint", group["params"], named)
        flat = [name for group in names for name in group]
        index_of = {name: index for index, name in enumerate(flat)}
        groups = [
            {**group, "params": [index_of[name] for name in named]}
            for group, named in zip(state["param_groups"], names, strict=True)
        ]
        kept = {index_of[name]: dict(values) for name, values in state["state"].items()}
        self._optimizer.load_state_dict({"state": kept, "param_groups": groups})
        self._undo_casts(state["state"], flat)

    def _names(self) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return [[names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]

    def _undo_casts(self, saved: Mapping[str, Mapping[str, Any]], flat: Sequence[str]) -> None:
        """torch gives loaded state the parameter's dtype, which would round an fp32 mean of a bf16 parameter."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for name, parameter in zip(flat, parameters, strict=True):
            for key, value in saved.get(name, {}).items():
                loaded = self._optimizer.state[parameter][key]
                if isinstance(value, torch.Tensor) and loaded.dtype != value.dtype:
                    self._optimizer.state[parameter][key] = value.to(loaded.device, copy=True)


class SchedulerState:
    """A scheduler's state, in which MultiStepLR and its like keep a Counter: no plain value."""

    def __init__(self, name: str, scheduler: LRScheduler) -> None:
        self._where, self._scheduler = f"scheduler {name!r}", scheduler

    def state_dict(self) -> Any:
        return _without_counters(self._scheduler.state_dict())

    def load_state_dict(self, state: Any) -> None:
        built = self._scheduler.state_dict()
        check_names(f"{self._where} of the checkpoint", state, built)
        state = _with_counters(state)
        total_steps = built.get("total_steps")
        if total_steps != (total_then := state.get("total_steps")):
            logger.warning(
                "%s was made for %s steps, and is for %s here: it goes on at step %s of those",
                self._where, total_then, total_steps, state["last_epoch"],
            )  # fmt: skip
            state = built | {key: state[key] for key in ("last_epoch", "_step_count", "_last_lr")}
        self._scheduler.load_state_dict(state)


class PrecisionState:
    """The loss scale, where there is one; a run that has another precision needs none, or begins with its own."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def state_dict(self) -> dict[str, Any]:
        return {} if self._precision.scaler is None else {"scaler": self._precision.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._precision.scaler is not None and "scaler" in state:
            self._precision.scaler.load_state_dict(state["scaler"])


@dataclass(frozen=True)
class Value:
    """A part that is a plain value."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], None]


@dataclass(frozen=True)
class Flag:
    """A wish of this rank's for all ranks: one that has it is enough, however many there are now."""

    state_dict: Callable[[], bool]
    raise_: Callable[[bool], None]

    def load_state_dicts(self, states: Sequence[bool], world_size: int) -> None:
        self.raise_(any(states))


# --- each rank's own ------------------------------------------------------------------------------------------------


class BufferState:
    """Buffers, where DDP leaves each rank its own; else the next forward begins with rank 0's, which are shared."""

    def __init__(self, model: nn.Module, rank: int, *, differ: bool) -> None:
        self._model, self._rank, self._differ = model, rank, differ

    def state_dict(self) -> dict[str, torch.Tensor]:
        if not self._differ:
            return {}
        return {name: value for name, value in self._model.state_dict().items() if name in self._names()}

    def load_state_dicts(self, states: Sequence[Mapping[str, torch.Tensor]], world_size: int) -> None:
        mine = states[self._rank % len(states)]
        if mine and self._differ:
            check_tensors(f"buffers of rank {self._rank}", mine, self.state_dict())
            self._model.load_state_dict(mine, strict=False)  # the weights are shared

    def _names(self) -> set[str]:
        return {name for name, _ in self._model.named_buffers()}


class LogState:
    """What was logged since the last line of metrics; of more ranks than there are now, nothing is lost."""

    def __init__(self, log: Callable[[], MetricLog], rank: int) -> None:
        self._log, self._rank = log, rank

    def state_dict(self) -> dict[str, Any]:
        return self._log().state_dict()

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], world_size: int) -> None:
        self._log().clear()
        for state in states[self._rank :: world_size]:
            self._log().extend(state)


# --- what fits ------------------------------------------------------------------------------------------------------


def check_names(where: str, saved: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise CheckpointError unless both are the same names."""
    missing, extra = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    if missing or extra:
        found = [
            f"{words}: {names_in_words(names)}" for words, names in (("missing", missing), ("extra", extra)) if names
        ]
        raise CheckpointError(f"{where} does not fit this run; {'; '.join(found)}. Build the parts that the run had.")


def check_tensors(where: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless both have the same names, and under each a tensor of the same shape and dtype."""
    check_names(f"{where} of the checkpoint", saved, wanted)
    different = [
        f"{name} is {_kind(saved[name])} in the checkpoint and {_kind(value)} here"
        for name, value in wanted.items()
        if _kind(saved[name]) != _kind(value)
    ]
    if different:
        raise CheckpointError(f"{where} of the checkpoint does not fit this run's: {names_in_words(different)}")


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _without_counters(state: Any) -> Any:
    if isinstance(state, Counter):
        return {"Counter": dict(state)}
    if isinstance(state, dict):
        return {key: _without_counters(value) for key, value in state.items()}
    return [_without_counters(value) for value in state] if isinstance(state, list) else state


def _with_counters(state: Any) -> Any:
    if isinstance(state, dict):
        decoded = {key: _with_counters(value) for key, value in state.items()}
        return Counter(decoded["Counter"]) if list(decoded) == ["Counter"] else decoded
    return [_with_counters(value) for value in state] if isinstance(state, list) else state
