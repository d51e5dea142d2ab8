"""SIGTERM and SIGUSR1 ask a rank to leave: all ranks then save at the next step boundary and go, to be run again.

SIGTERM means two things: a scheduler wants the machine, or an elastic agent ends the survivors of a failure. So a rank
that is told first looks for one that has failed; where there is one it is gone at once. It looks in a thread, which
learns of the signal even while the main thread is inside a collective. A second signal ends the rank at once, too; what
comes within a moment of the first is the same one on another way (a scheduler tells every process, and the launcher
tells its ranks).
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from safetrain import rank_log
from safetrain.forking import own_signals_in_children

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ECHO_S = 5.0
_LOOK_S = 1.0
_STOP = b"\0"

_shared_requests = itertools.count()
_heard_here: set[signal.Signals] = set()


class Board(Protocol):
    """What of a ``Comm`` is used here."""

    def post(self, key: str, text: str) -> None: ...
    def read(self, key: str) -> str | None: ...


class LeaveRequest:
    """Whether this rank was told to leave; ``signal_name`` says by what, and is empty until then."""

    def __init__(self) -> None:
        self.signal_name = ""

    @property
    def wanted(self) -> bool:
        return bool(self.signal_name)


class SharedRequest:
    """The ranks' requests in one: true on all ranks within about a second of the first one's, in no collective.

    Costs what a look at the clock costs, and once in a second one at the store. All ranks make as many of them.
    """

    def __init__(self, own: LeaveRequest, board: Board) -> None:
        self._own, self._board, self._key = own, board, f"leave/{next(_shared_requests)}"
        self._looked_at = time.monotonic()

    def __call__(self) -> bool:
        if self._own.wanted:
            self._board.post(self._key, "")
            return True
        if time.monotonic() - self._looked_at < _LOOK_S:
            return False
        self._looked_at = time.monotonic()
        return self._board.read(self._key) is not None


@contextmanager
def leave_request(someone_failed: Callable[[], bool]) -> Iterator[LeaveRequest]:
    """Listen until the block ends. Where it can't (no main thread, handlers of the user's own), nobody is ever told."""
    request = LeaveRequest()
    mine = threading.current_thread() is threading.main_thread()
    heard = [number for number in _SIGNALS if mine and signal.getsignal(number) is signal.SIG_DFL]
    if not heard:
        yield request
        return
    _heard_here.update(heard)
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    listener = threading.Thread(
        target=_listen, args=(inbox, heard, request, someone_failed), name="safetrain-signals", daemon=True
    )
    listener.start()
    fd_before = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    for number in heard:
        signal.signal(number, _nothing)  # the number goes to the listener, from where it can't be delayed
    try:
        yield request
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)
        _heard_here.clear()
        signal.set_wakeup_fd(fd_before)
        outbox.send(_STOP)
        listener.join()
        inbox.close()
        outbox.close()


def _in_child() -> None:
    """A forked child (a process pool of the user's) is none of the ranks: signals end it, and are not told to its
    parent."""
    if _heard_here:
        signal.set_wakeup_fd(-1)
        for number in _heard_here:
            signal.signal(number, signal.SIG_DFL)
        _heard_here.clear()


own_signals_in_children(lambda: _heard_here, _in_child)


def _nothing(_number: int, _frame: object) -> None:
    pass


def _listen(
    inbox: socket.socket, heard: list[signal.Signals], request: LeaveRequest, someone_failed: Callable[[], bool]
) -> None:
    first_at: float | None = None
    while (number := inbox.recv(1)) not in (_STOP, b""):
        if number[0] not in heard:
            continue
        again = first_at is not None and time.monotonic() - first_at > ECHO_S
        if again or someone_failed():
            rank_log.flush()
            os._exit(128 + number[0])
        first_at = first_at or time.monotonic()
        request.signal_name = signal.Signals(number[0]).name
