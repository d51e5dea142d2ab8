"""A child process that does not outlive the process that started it, however that one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerProcess

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing is done).

    Call it first thing in a child of ``multiprocessing``. A parent that died before the call is noticed, too. A child
    of a fork server is killed with the server, which ends with the process that started it.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    by_server = isinstance(multiprocessing.current_process(), ForkServerProcess)
    if parent is not None and not by_server and os.getppid() != parent.pid:
        os._exit(1)
