"""What one rank says, or what can be found out about it, when the ranks are asked why nothing moves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Self

import torch

import safetrain
from safetrain import machine
from safetrain.failure import is_user_file
from safetrain.flight_recorder import Collective, last_collectives
from safetrain.patience import Patience
from safetrain.stacks import ENDED, Frame, answering_children, ask, stack_of, state_of, user_frame

State = Literal["moving", "waiting", "stuck", "busy", "paused", "silent", "left"]
"""``waiting``: over its limit, and in a collective. ``stuck``: over its limit anywhere else.
``busy``: the same in a guarded script, but it computes. ``silent``: the process
does not answer. ``left``: it is no longer watched, having left ``fit()``."""

_TORCH, _SAFETRAIN = (str(Path(module.__file__ or "").parent) + os.sep for module in (torch, safetrain))
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")  # noqa: PTH118  a prefix of file names
_LOADER = os.path.join(_TORCH, "utils", "data", "dataloader.py")  # noqa: PTH118  as frames spell it
_WAITS_FOR_RANKS = tuple(_SAFETRAIN + name for name in ("comm.py", "sections.py", "collectives.py"))
_COMPILERS = tuple(_TORCH + name + os.sep for name in ("_dynamo", "_inductor"))
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "debugpy")
_WAITING_CALLS = (".wait(", ".item(", ".cpu(", ".tolist(", "synchronize(")
_PHASES = {
    ("parts.py", "training_step"): "training_step",
    ("parts.py", "backward"): "backward",
    ("feed.py", ""): "data",
    ("evaluation.py", ""): "validation",
    ("precision.py", "step"): "optimizer",
    ("report.py", ""): "log",
    ("assembly.py", "assemble"): "build",
}  # by file and function of safetrain
_TIMED_WAITS = ("threading.py", "selectors.py")


@dataclass(frozen=True)
class Worker:
    """A loader process of a rank; ``state`` is the kernel's letter for it."""

    pid: int
    state: str
    stack: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Testimony:
    """Where one rank is.

    Attributes:
        seconds: without progress; ``limit_s``: how many the phase may take; ``count``: of the phases entered so far.
        process_state: of a silent rank on the judge's machine: the kernel's letter for it (see stacks.py), or "gone".
        stack: of the thread that trains, innermost last.
        collectives: the last ones of each group.
        calls: what user code issued since the last vote, in words.
        workers: loader processes, where the rank waits for one.
        note: of a rank that has left: what it did, where that is known.
        last_chance: the time limit of what it waits in is about to end the job anyway.
        at_work: of a guarded script: it uses the CPU, or is at ever new places (stillness.py).
        time_ns, since_ns: when it was said, and when the phase began, by the rank's own clock; 0: not known.
    """

    rank: int
    host: str
    pid: int
    step: int
    epoch: int
    phase: str
    seconds: float
    limit_s: float
    count: int
    state: State
    process_state: str = ""
    stack: tuple[Frame, ...] = ()
    collectives: tuple[Collective, ...] = ()
    calls: tuple[str, ...] = ()
    workers: tuple[Worker, ...] = ()
    time_ns: int = 0
    since_ns: int = 0
    machine: str = ""
    note: str = ""
    last_chance: bool = False
    at_work: bool = False

    @classmethod
    def brief(cls, rank: int, patience: Patience) -> Self:
        """Of this process, without its stack: cheap enough to be said all the time."""
        a = patience.activity
        return cls(
            rank=rank, host=machine.host(), machine=machine.identity(), pid=os.getpid(), step=a.step, epoch=a.epoch,
            phase=a.phase, seconds=patience.seconds, limit_s=patience.limit_s, count=a.count, state="moving",
        )  # fmt: skip

    @classmethod
    def full(cls, rank: int, patience: Patience, thread_id: int, calls: Sequence[str]) -> Self:
        """Of this process, with all that takes longer to find out; ``thread_id`` is of the thread that trains."""
        one = cls.brief(rank, patience)
        stack, collectives = stack_of(thread_id), tuple(last_collectives())
        state, limit_s = one.state, one.limit_s
        if any(frame.file.endswith(_DEBUGGERS) for frame in stack):
            state = "paused"
        elif _waits_for_ranks(stack, collectives):
            limit_s = patience.wait_limit_s
            state = "waiting" if one.seconds > limit_s else "moving"
        else:
            limit_s = max(limit_s, patience.compile_limit_s) if _in(stack, _COMPILERS) else limit_s
            state = "stuck" if one.seconds > limit_s else "moving"
        workers = _workers() if state == "stuck" and _waits_for_loader(stack) else ()
        now_ns, phase_s = time.time_ns(), time.monotonic() - patience.activity.since
        return replace(
            one, state=state, limit_s=limit_s, stack=stack, collectives=collectives, workers=workers,
            calls=tuple(calls), time_ns=now_ns, since_ns=now_ns - int(phase_s * 1e9),
        )  # fmt: skip

    @property
    def is_here(self) -> bool:
        """Whether the rank is on this machine."""
        return self.machine == machine.identity()

    def probed(self) -> Self:
        """Of a silent rank, with what can be found out from outside, where it is on this machine."""
        if not self.is_here:
            return self
        state = state_of(self.pid)
        if state in ENDED:
            return replace(self, process_state="gone")
        stack = () if state == "T" else ask(self.pid)
        return replace(self, process_state=state, stack=stack, phase=_phase_in(stack))

    @property
    def stands_still(self) -> bool:
        return self.state in ("stuck", "waiting")

    @property
    def user_frame(self) -> Frame | None:
        """The line of the user's where this rank is: of a loader process, where it waits for one."""
        for worker in self.workers:
            if frame := user_frame(worker.stack):
                return frame
        return user_frame(self.stack)

    @property
    def pending(self) -> Collective | None:
        """The collective that holds this rank up: the first that some rank has not come to, so far as it knows."""
        return next((one for one in self.collectives if not one.done), None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        workers = [Worker(w["pid"], w["state"], _frames(w["stack"])) for w in values.pop("workers")]
        collectives = [_collective(one) for one in values.pop("collectives")]
        stack, calls = _frames(values.pop("stack")), tuple(values.pop("calls"))
        return cls(**values, stack=stack, calls=calls, collectives=tuple(collectives), workers=tuple(workers))


def _phase_in(stack: Sequence[Frame]) -> str:
    """The phase that the frames of safetrain in a stack belong to; empty where none says."""
    places = ((Path(frame.file).name, frame.function) for frame in reversed(stack) if frame.file.startswith(_SAFETRAIN))
    return next((phase for place in places if (phase := _PHASES.get(place) or _PHASES.get((place[0], "")))), "")


def _frames(values: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(**value) for value in values)


def _collective(values: Mapping[str, Any]) -> Collective:
    shapes = tuple(tuple(shape) for shape in values["shapes"])
    return Collective(**{**values, "members": tuple(values["members"]), "shapes": shapes})


def _in(stack: Sequence[Frame], places: tuple[str, ...]) -> bool:
    return any(frame.file.startswith(places) for frame in stack)


def _waits_for_ranks(stack: Sequence[Frame], collectives: Sequence[Collective]) -> bool:
    """Whether what holds this thread up is other ranks: a collective, or a wait of safetrain's own on the store."""
    if not stack or _imports(stack):
        return False
    inner = next((f for f in reversed(stack) if not f.file.endswith(_TIMED_WAITS)), stack[-1])
    if inner.file.startswith((_DISTRIBUTED, *_WAITS_FOR_RANKS)):
        return True
    if all(one.done for one in collectives):
        return False
    if inner.file.startswith((_TORCH, _SAFETRAIN)):
        return not _waits_for_loader(stack)
    # work.wait() of a collective that was started before, or a device that waits for one; also in a library
    return any(call in inner.source for call in _WAITING_CALLS)


def _imports(stack: Sequence[Frame]) -> bool:
    """Whether a library is being imported: torch does so late, and it takes long. A script may itself be imported."""
    of_libraries = takewhile(lambda frame: not is_user_file(frame.file), reversed(stack))
    return any(frame.file.startswith("<frozen importlib") for frame in of_libraries)


def _waits_for_loader(stack: Sequence[Frame]) -> bool:
    return any(frame.file == _LOADER and frame.function == "_try_get_data" for frame in stack)


def _workers() -> tuple[Worker, ...]:
    return tuple(Worker(pid, state_of(pid), ask(pid)) for pid in answering_children())
