"""Signals round a fork: a child is none of the ranks, and signals are its own from its first instruction on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection


def own_signals_in_children(handled: Callable[[], Collection[int]], in_child: Callable[[], None]) -> None:
    """From now on ``in_child``, which resets handlers, is called in each forked child; ``handled``: of which signals.

    What comes to the child before that waits, and then finds its own handlers. Else it would go to the parent's, which
    the child still has for some microseconds, and be lost: a pool that ends its processes at once waits for ever.
    """
    held = threading.local()

    def hold() -> None:
        numbers = handled()
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None

    def release() -> None:
        if held.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def begin() -> None:
        in_child()
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=begin)
