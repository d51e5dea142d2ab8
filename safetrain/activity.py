"""What this process is doing right now: plain attributes, written by the loop and read by the watchdog's thread.

Phases of the loop: start, build, epoch_start, data, sync_buffers, training_step, backward, vote, optimizer, log,
validation_start, validation, save_checkpoint, load_checkpoint, save_profile, train_end; ``rank_zero:<name>``,
``barrier:<name>`` for meetings; ``paused`` at a breakpoint. To enter one costs 0.2 µs and counts as progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic


class Activity:
    """One process' place in the run.

    Attributes:
        step, epoch: where the loop is; a step counts from 0 and is the one under way.
        phase: what is being done, ``since`` when (``time.monotonic()``, in seconds).
        count: grows with each phase entered. The same number later means: no progress in between.
        finished: phases that this process has been through; the first time may take longer, since it may compile.
        limit_s: how long the phase may take, where it has a limit of its own (``math.inf``: as long as it likes).
        spent: seconds in each phase so far, without the present one.
        listeners: are called with each phase as it is entered, for as long as they are here; none costs 20 ns.
    """

    __slots__ = ("count", "epoch", "finished", "limit_s", "listeners", "phase", "since", "spent", "step")

    def __init__(self) -> None:
        self.count = 0
        self.phase, self.since = "", monotonic()
        self.spent: dict[str, float] = {}
        self.listeners: tuple[Callable[[str], None], ...] = ()
        self.restart("start")

    def restart(self, phase: str) -> None:
        """A run begins here: its first step is still to come."""
        self.step, self.epoch = 0, 0
        self.limit_s: float | None = None
        self.finished: set[str] = set()
        self.phase = phase
        self.enter(phase)
        self.finished.clear()

    def enter(self, phase: str) -> None:
        """Something new begins here."""
        now = monotonic()
        self.finished.add(self.phase)
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now
        self.count += 1
        for listener in self.listeners:
            listener(phase)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with each phase from now on, in the thread that runs the loop."""
        self.listeners = (*self.listeners, listener)

    def leave(self, listener: Callable[[str], None]) -> None:
        """``listener`` has heard enough; it need not be one."""
        self.listeners = tuple(one for one in self.listeners if one != listener)

    @contextmanager
    def within(self, phase: str, limit_s: float | None = None) -> Iterator[None]:
        """Be in ``phase``, for at most ``limit_s`` where given, and then back in the one before."""
        phase_before, limit_before = self.phase, self.limit_s
        self.limit_s = limit_s
        self.enter(phase)
        try:
            yield
        finally:
            self.limit_s = limit_before
            self.enter(phase_before)


ACTIVITY = Activity()
"""This process' own. A forked child starts with a copy."""
