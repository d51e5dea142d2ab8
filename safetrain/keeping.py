"""When a run saves its state: the plan of checkpoints, kept alike on every rank, and what goes into one.

A checkpoint is taken after an optimizer step, before anything that follows from it; only at the end of an epoch it
waits for the validation, whose metric tells which one is best. So a run is saved inside an epoch or between two, and in
both cases goes on as it would have gone on.

What a clock or a user wants becomes known in one window's vote and is done after the next window.

When ranks fail together, the state of the last whole step is saved by the same means: the writers meet on the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from safetrain import tree
from safetrain.activity import ACTIVITY
from safetrain.checkpoint import Checkpoints
from safetrain.checks import nearest
from safetrain.config import Checkpoint
from safetrain.errors import (
    CheckpointError,
    Preempted,
    SafetrainError,
    TrainingStopped,
    UsageError,
    together,
)
from safetrain.feed import Feed
from safetrain.report import Reporter
from safetrain.snapshot import Snapshot
from safetrain.state import RunState
from safetrain.window import Window, WindowResult


class Keeper:
    """Decides after each window whether all ranks save, and does it."""

    def __init__(
        self, state: RunState, window: Window, feed: Feed, reporter: Reporter,
        checkpoints: Checkpoints | None, options: Checkpoint, *, max_steps: int | None, rank: int, config_text: str,
    ) -> None:  # fmt: skip
        self._state, self._window, self._reporter = state, window, reporter
        self._checkpoints, self._options = checkpoints, options
        self._max_steps, self._config_text = max_steps, config_text
        self._keeps_time = rank == 0 and options.every_minutes is not None
        feed.remembers = checkpoints is not None
        self._saved_at = monotonic()
        self._asked_here = self._agreed = self._planned = self._leaves = False

    def try_out(self) -> None:
        """Say before the first step, not at the first checkpoint, that something can't be saved.

        Raises:
            UsageError: naming it.
        """
        if self._checkpoints is not None and self._options.saves:
            snapshot = self.snapshot(0, 0)
            for state in (snapshot.shared, snapshot.own):
                tree.rebuild(state, lambda _, tensor: tensor)

    def ask(self) -> None:
        """This rank wants a checkpoint, soon."""
        self._asked_here = True

    def wishes(self) -> bool:
        """For this rank's vote."""
        minutes = self._options.every_minutes
        overdue = self._keeps_time and minutes is not None and monotonic() - self._saved_at > 60 * minutes
        return (self._asked_here or overdue) and not self._agreed

    def window_opens(self, step: int) -> None:
        """Window number ``step`` is about to run."""
        every, done = self._options.every_steps, step + 1
        last = self._options.at_end and done == self._max_steps
        self._planned = self._agreed or last or (every is not None and done % every == 0)

    def window_done(self, step: int, epoch: int, result: WindowResult) -> None:
        """``step`` steps are done; all ranks call it.

        Raises:
            Preempted: some rank was told to leave, and the run is saved.
        """
        due = self._planned or (self._options.at_end and result.stop)
        leaves = self._leaves
        if result.save or result.leave:
            self._agreed, self._asked_here = True, False
            self._leaves = self._leaves or result.leave
        if due and not result.epoch_ends:
            self._save(step, epoch, None)
            if leaves:
                self._leave(step)

    def epoch_done(self, step: int, epochs: int, validation: Mapping[str, float], *, last: bool) -> None:
        """Between two epochs, ``epochs`` being done; ``validation``: what this one's gave, if it had one.

        Raises:
            Preempted: as ``window_done`` does; not at the run's own end.
            UsageError: as ``metric_in`` does; the epoch is saved, it is not to be lost over a name.
        """
        try:
            metric = metric_in(validation, self._options.metric)
        except UsageError as error:
            self._save(step, epochs, None)
            self.finish()
            if self._checkpoints is None:
                raise
            raise together(UsageError(f"{error} The epoch is saved: correct the name, and add resume=auto.")) from None
        every = self._options.every_epochs
        if self._planned or self._agreed or (every and epochs % every == 0) or (last and self._options.at_end):
            self._save(step, epochs, metric)
        if self._leaves and not last:
            self._leave(step)

    def leave_validation(self, step: int, epoch: int) -> NoReturn:
        """Some rank was told to leave, and all have left their validation: it is run again by who goes on."""
        self._window.go_back()
        self._save(step, epoch, None)
        self._leave(step)

    def _leave(self, step: int) -> NoReturn:
        self.finish()
        raise Preempted(step, saved=self._checkpoints is not None)

    def finish(self) -> None:
        """What was saved is written when this returns."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def _save(self, step: int, epoch: int, metric: float | None) -> None:
        self._planned = self._agreed = False
        if self._checkpoints is None:
            return
        self._settle(step, epoch)
        self._reporter.checkpoint(step, epoch)
        with ACTIVITY.within("save_checkpoint"):
            self._checkpoints.save(self.snapshot(step, epoch), metric=metric)
        self._saved_at = monotonic()

    @contextmanager
    def rescuing(self, where: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Save what is whole when the ranks fail together in this block; ``where`` they are: step and epoch."""
        try:
            yield
        except SafetrainError as error:
            step, epoch = where()
            # between two epochs nobody knows how far on_epoch_start has come, and before the first step nothing is won
            whole = error.together and self._window.inside_epoch and step > 0
            if whole and self._checkpoints and self._options.at_failure_s:
                go_on = ". As it is, it would come to this again." if error.remedy else ": go on with resume=auto."
                error.kept = self._rescue(self._checkpoints, step, epoch, go_on)
                error.add_note(error.kept)
            raise

    def _rescue(self, checkpoints: Checkpoints, step: int, epoch: int, go_on: str) -> str:
        """Save the state of the last whole step, in no collective, and say what became of it."""

        def take() -> Snapshot:
            if not self._window.go_back():
                raise UsageError("it failed within an optimizer step")
            with suppress(TrainingStopped):  # the last step was none: what follows from that is done all the same
                self._settle(step, epoch)
            self._reporter.checkpoint(step, epoch)
            return self.snapshot(step, epoch)

        try:
            path = Path(checkpoints.save_at_failure(step, take))
        except CheckpointError as error:
            return f"The state at step {step} is not saved: {error}."
        return f"The state at step {step} is saved in {path.parent.name}/{path.name}{go_on}"

    def _settle(self, step: int, epoch: int) -> None:
        if dropped_late := self._window.settle():
            self._reporter.skipped(step - 1, epoch, dropped_late)

    def snapshot(self, step: int, epoch: int) -> Snapshot:
        """The state of the run as it is now; tensors are the live ones."""
        own: dict[str, Any] = self._state.save_own()
        return Snapshot(step, epoch, self._state.save_shared(), own, self._config_text)


def metric_in(validation: Mapping[str, float], name: str | None) -> float | None:
    """The value that tells which checkpoint is best, and a sweep which job; None: there is none.

    Raises:
        UsageError: on all ranks: this validation has others. After the first one, not at the end of a week.
    """
    if name is None or not validation:
        return None
    if name not in validation:
        logged = ", ".join(sorted(validation))
        text = f"metric={name}: validation did not log it.{nearest(name, validation)} Logged: {logged}."
        raise together(UsageError(text))
    return validation[name]
