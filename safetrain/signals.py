"""What a launcher does when it gets a signal: the first one ends the job, a second one leaves at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from safetrain.preemption import ECHO_S

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal ended the job; no rank is left. ``host``: which launcher got it; empty for this one."""

    def __init__(self, number: signal.Signals, host: str = "") -> None:
        super().__init__(number.name)
        self.number, self.host = number, host


class Told:
    """The first signal, wherever it came from: to this launcher, or to that of another machine."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._first_at = 0.0

    def note(self, number: int) -> bool:
        """Whether it is the first one."""
        if self.first is not None:
            return False
        self.first, self._first_at = signal.Signals(number), time.monotonic()
        return True

    def is_echo(self, number: int) -> bool:
        """A scheduler tells the whole job, and its script tells the launcher again."""
        return number == self.first == signal.SIGTERM and time.monotonic() - self._first_at < ECHO_S


@contextmanager
def signals_end_the_job(end: type[Exception]) -> Iterator[Told]:
    """While the block runs, the first signal raises ``end`` in it; on a second one the kernel kills the ranks.

    Raises:
        Interrupted: a signal has ended the block.
    """
    told = Told()

    def handle(number: int, _frame: FrameType | None) -> None:
        if told.is_echo(number):
            return
        if not told.note(number):
            os.write(2, b"\nInterrupted again; the ranks are killed.\n")
            os._exit(128 + number)
        raise end(f"got signal {number}", signal.SIGTERM)

    # a signal that is ignored stays so: nohup, and background jobs of a shell script, count on it
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield told
    except end:
        assert told.first is not None
        raise Interrupted(told.first) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
