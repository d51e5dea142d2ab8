"""What the loop tells its observers, and when: the metrics of the last windows at every logging interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from safetrain.activity import ACTIVITY
from safetrain.comm import Comm
from safetrain.departure import within
from safetrain.errors import Preempted
from safetrain.memory import MemoryMeter, MemoryTable
from safetrain.metrics import MetricLog
from safetrain.observer import OF_THE_MACHINE, Event, Observer, RunInfo
from safetrain.phase_clock import phase_clock
from safetrain.timing import Machine, StepClock, TimeTable
from safetrain.window import WindowResult

if TYPE_CHECKING:
    from safetrain.feed import Feed
    from safetrain.trainer import Trainer


_LAST_WORDS_S = 5.0  # an observer that waits for the network must not keep the others from hearing of a failure
_FAREWELL_S = 60.0


@dataclass(frozen=True)
class Result:
    """What a run came to; the same on every rank."""

    step: int
    epoch: int
    applied_steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def skipped_steps(self) -> int:
        """Windows that no rank stepped on."""
        return self.step - self.applied_steps


def describe_run(trainer: Trainer, feed: Feed, start_events: int = 0) -> RunInfo:
    """What observers are told at the start."""
    batches = feed.batches_per_epoch
    return RunInfo(
        rank=trainer.comm.rank,
        world_size=trainer.comm.world_size,
        run_dir=trainer.run_dir,
        name=trainer.name,
        epochs=trainer.loop.epochs,
        steps_per_epoch=None if batches is None else -(-batches // trainer.loop.accumulate),
        max_steps=trainer.loop.max_steps,
        start_step=trainer.step,
        start_events=start_events,
        config_text=trainer.config_text,
        device=str(trainer.comm.device),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
    )


class Reporter:
    """Fans out to the observers. Values are read (``.item()``) only at the logging interval."""

    def __init__(
        self, observers: Sequence[Observer], comm: Comm, optimizers: Mapping[str, Optimizer], log_every_steps: int,
        machine: Machine,
    ) -> None:  # fmt: skip
        self._observers, self._comm, self._optimizers = observers, comm, optimizers
        self._log_every_steps, self._machine = log_every_steps, machine
        self._skipped_steps = 0
        self._events = 0
        self._phases = phase_clock(ACTIVITY, comm.device)
        self._clock, self._timing = StepClock(self._phases), TimeTable(comm.rank, comm.world_size)
        self._meter = MemoryMeter(ACTIVITY, comm.device)
        self._memory = MemoryTable(comm.rank, comm.world_size, comm.local_world_size)
        self._total_steps: int | None = None
        self.restart_clock()

    def start(self, run: RunInfo) -> None:
        self._total_steps = run.total_steps
        for observer in self._observers:
            observer.start(run)

    def restart_clock(self) -> None:
        """Training goes on after something else: do not count that into the throughput."""
        self._since, self._weight, self._steps = time.perf_counter(), 0, 0
        self._clock.lap()

    def window(self, step: int, epoch: int, result: WindowResult, log: MetricLog) -> None:
        """One window is done; ``step`` counts it. All ranks call it alike."""
        ACTIVITY.enter("log")
        self._weight, self._steps = self._weight + result.weight, self._steps + 1
        if result.applied:
            for name, value, weight in result.losses:
                log.add(name, value, weight)
        if result.dropped_late:
            self.skipped(step - 2, epoch, result.dropped_late)
        if result.dropped:
            self.skipped(step - 1, epoch, result.dropped)
        for observer in self._observers:
            observer.step(step, epoch)
        if step % self._log_every_steps == 0:
            self._tell(Event("train", step, epoch, self._metrics(result, log)))
            if straggler := self._timing.straggler():
                self._tell(Event("timing", step, epoch, text=str(straggler)))
            for warning in self._memory.warnings(step, self._total_steps):
                self._tell(Event("memory", step, epoch, text=warning))
            self.restart_clock()
        if (step + 1) % self._log_every_steps == 0:
            self._meter.look_at_next_step()

    def skipped(self, step: int, epoch: int, reason: str) -> None:
        """Window number ``step`` (from 0, as in messages) was dropped by all ranks."""
        self._skipped_steps += 1
        self._tell(Event("skip", step, epoch, {"train/skipped_steps": self._skipped_steps}, reason))

    def _metrics(self, result: WindowResult, log: MetricLog) -> dict[str, float]:
        spent = {part: seconds / self._steps for part, seconds in self._clock.lap().items()}
        times = self._timing.row(spent)
        rows = [*times, *self._memory.row(self._meter)]
        # the vote compared the names of an applied window; else ranks may have logged different ones
        if result.applied and result.same_log_keys:
            reduced, table = log.sum_fast(self._comm, beside=rows)
        else:
            reduced, table = log.reduce(self._comm), self._comm.sum_vector(rows)
        self._timing.add(table[: len(times)], self._steps)
        self._memory.add(table[len(times) :])
        log.clear()
        metrics = {f"train/{name}": value for name, value in reduced.items()}
        metrics |= {f"time/{part}_ms": 1000 * seconds for part, seconds in self._timing.mean_s.items()}
        metrics |= self._memory.metrics()
        for name, optimizer in self._optimizers.items():
            suffix = "" if len(self._optimizers) == 1 else f"/{name}"
            metrics[f"train/lr{suffix}"] = float(optimizer.param_groups[0]["lr"])
        if result.grad_norm is not None:
            metrics["train/grad_norm"] = float(result.grad_norm)
        metrics["train/samples_per_s"] = self._weight / max(time.perf_counter() - self._since, 1e-9)
        metrics["train/skipped_steps"] = float(self._skipped_steps)
        return metrics

    def validation(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        ACTIVITY.enter("log")
        self._tell(Event("validation", step, epoch, metrics))

    def checkpoint(self, step: int, epoch: int) -> None:
        """The state after ``step`` steps is about to be saved."""
        self._tell(Event("checkpoint", step, epoch))

    def state_dict(self) -> dict[str, int]:
        return {"skipped_steps": self._skipped_steps, "events": self._events}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._skipped_steps, self._events = state["skipped_steps"], state["events"]

    def end(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        ACTIVITY.enter("log")
        if summary := self._timing.summary(self._machine):
            self._tell(Event("timing", step, epoch, text=summary))
        if memory := self._memory.summary():
            self._tell(Event("memory", step, epoch, text=memory))
        self._tell(Event("end", step, epoch, metrics))

    @contextmanager
    def running(self, where: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """The run: observers hear when it ends badly, ``where`` (step and epoch) and why, and that it is over."""
        try:
            yield
        except BaseException as error:
            event, limit_s = Event("failed", *where(), text=str(error) or type(error).__name__), _LAST_WORDS_S
            if isinstance(error, Preempted):  # nobody waits for this rank any more
                event, limit_s = (
                    replace(event, kind="preempted", text="saved" if error.saved else "not saved"),
                    _FAREWELL_S,
                )
            trouble: list[Exception] = []
            within(limit_s, partial(self._last_words, event, trouble))
            for second in trouble:
                error.add_note(f"Then an observer failed as well: {type(second).__name__}: {second}")
            raise
        self.close()

    def _last_words(self, event: Event, trouble: list[Exception]) -> None:
        """Tell observers how the run ended; what goes wrong with them must not hide why."""
        try:
            try:
                self._tell(event)
            finally:
                self.close()
        except Exception as error:  # noqa: BLE001  the run's own error is the one that people look for
            trouble.append(error)

    def close(self) -> None:
        """The run is over, or never began; whatever an observer does, nothing listens to the loop any more."""
        self._phases.close()
        self._meter.close()
        for observer in self._observers:
            observer.close()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """What happens in the block has happened before, in another process, and was told there."""
        observers, self._observers = self._observers, ()
        try:
            yield
        finally:
            self._observers = observers

    def _tell(self, event: Event) -> None:
        self._events += event.kind not in OF_THE_MACHINE
        for observer in self._observers:
            observer.event(event)
