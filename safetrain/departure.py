"""How a process leaves on a verdict: told, written, gone; whatever the disk, the terminal and other threads do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from safetrain import rank_log
from safetrain.verdict import Verdict, published

_leaving = threading.Lock()
_FLUSH_S = 0.5  # the thread that trains may hold the lock of a stream for ever


def be_the_one_who_leaves() -> None:
    """Of several threads of this process that have found an end, the first goes on, and the others wait for it."""
    _leaving.acquire()


def tell(verdict: Verdict, run_dir: Path | None, *, tells: bool) -> None:
    """Publish the verdict, and print it where nobody else will read and print it."""
    text = verdict.publish(run_dir)
    unread = run_dir is None or published(run_dir) is None  # the disk took no file, and the launcher has none to read
    if text is not None and (tells or unread):
        print_verdict(text)


def print_verdict(text: str) -> None:
    """For the person who watches; whatever holds up the stream."""
    if text:
        within(_FLUSH_S, lambda: _print(text))


def leave_now(silent: Iterable[int] = ()) -> NoReturn:
    """End this process, and those of ``silent`` (process ids on this machine), which cannot do it themselves."""
    for pid in silent:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for child in multiprocessing.active_children():  # a loader process that is stuck would never miss its rank
        child.kill()
    within(_FLUSH_S, rank_log.flush)
    os._exit(1)


def _print(text: str) -> None:
    rank_log.flush()
    stream = rank_log.terminal()
    stream.write(text)
    stream.flush()


def within(limit_s: float, action: Callable[[], object]) -> None:
    """Do it in a thread; go on without it after ``limit_s``."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)
