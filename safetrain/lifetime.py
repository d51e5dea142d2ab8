"""A child process that does not outlive the process that started it, however that one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from functools import partial
from multiprocessing.context import (
    BaseContext,
    ForkContext,
    ForkProcess,
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from typing import Any

_PR_SET_PDEATHSIG = 1
_KILL_LIMIT_S = 5.0  # one that waits in the kernel, for a disk, is not waited for


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


def heed_no_signal_of_a_scheduler() -> None:
    """In a loader process: SIGTERM and SIGUSR1 do nothing.

    A scheduler, and torchrun, send them to every process of a job, and it is for the rank to decide what follows:
    without its loader processes it could not come to the end of the step. The rank itself ends them by SIGKILL
    (``loader_context``). Not ignored, since commands that the user's code starts would ignore them, too; not blocked,
    since numpy's threads, started before, would not be.
    """
    if type(multiprocessing.current_process()) in _LOADER_PROCESSES:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _do_nothing)


def loader_context(given: BaseContext | None) -> BaseContext:
    """``given`` (None: the default), with processes that heed no SIGTERM, so that ``terminate()`` kills them."""
    context = given or multiprocessing.get_context()
    return _CONTEXTS[type(context)]() if type(context) in _CONTEXTS else context


def _do_nothing(_number: int, _frame: object) -> None:
    pass


def _killed_by_terminate(popen: Any) -> Any:
    popen.terminate = partial(_kill, popen)
    return popen


def _kill(popen: Any) -> None:
    """Kill a loader process and reap it, before torch, which hears of each child's end, takes it for an accident."""
    here = threading.current_thread() is threading.main_thread()  # else no handler can be set, and none is called
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if here else None
    try:
        popen.kill()
        popen.wait(_KILL_LIMIT_S)
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)


class LoaderForkProcess(ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  multiprocessing's own name; also its clean-up at exit ends it
        return _killed_by_terminate(ForkProcess._Popen(process_obj))


class LoaderSpawnProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        return _killed_by_terminate(SpawnProcess._Popen(process_obj))


class LoaderForkServerProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        return _killed_by_terminate(ForkServerProcess._Popen(process_obj))


class _LoaderForkContext(ForkContext):
    Process = LoaderForkProcess


class _LoaderSpawnContext(SpawnContext):
    Process = LoaderSpawnProcess


class _LoaderForkServerContext(ForkServerContext):
    Process = LoaderForkServerProcess


_LOADER_PROCESSES = (LoaderForkProcess, LoaderSpawnProcess, LoaderForkServerProcess)
_CONTEXTS: dict[type[BaseContext], type[BaseContext]] = {
    ForkContext: _LoaderForkContext,
    SpawnContext: _LoaderSpawnContext,
    ForkServerContext: _LoaderForkServerContext,
}


def _die_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
