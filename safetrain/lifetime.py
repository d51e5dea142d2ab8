"""A child process that does not outlive the process that started it, however that one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.context import ForkServerProcess

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process at once when the one that started it is gone. Call it first thing in the child.

    On Linux the kernel does it. A fork server stands between parent and child and lives as long as the child: there,
    and on other systems, a thread waits for the parent's end (in children of ``multiprocessing`` only: they know it).
    """
    parent = multiprocessing.parent_process()
    by_server = sys.platform == "linux" and isinstance(multiprocessing.current_process(), ForkServerProcess)
    if sys.platform == "linux" and not by_server:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if parent is not None and os.getppid() != parent.pid:  # it died before the call
            os._exit(1)
    elif parent is not None:
        threading.Thread(target=_die_after, args=(parent,), name="die_with_parent", daemon=True).start()


def heed_only_parent() -> None:
    """In a child of ``multiprocessing``, before it has threads: only its parent can end it by SIGTERM or SIGUSR1.

    A scheduler, and torchrun, send them to every process of a job, and it is for the rank to decide what follows:
    without its loader workers it could not come to the end of the step.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not hasattr(signal, "sigwaitinfo"):  # macOS has none
        return
    numbers = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    threading.Thread(target=_heed, args=(parent.pid, numbers), name="heed_only_parent", daemon=True).start()


def _heed(parent: int | None, numbers: set[signal.Signals]) -> None:
    while True:
        if signal.sigwaitinfo(numbers).si_pid == parent:
            os._exit(0)


def _die_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
