"""The kinds of standstill that one rank can be in: what it is called, what it comes from as a rule, what to do."""

from __future__ import annotations

from dataclasses import dataclass

from safetrain.advice import advice_on
from safetrain.testimony import Testimony

_LOCK_FILES = ("threading.py", "queue.py")
_LOCK_CALLS = (".acquire(", "with ", ".join(", ".get(", ".wait(")


@dataclass(frozen=True)
class Remedy:
    """``state``: what the rank is, after "is"; ``cause`` and ``remedy``: sentences."""

    state: str
    cause: str
    remedy: str


def remedy_for(one: Testimony) -> Remedy:
    """The words for a rank that is stuck or does not answer."""
    if one.state == "busy":
        return Remedy(
            "at work outside any collective",
            "that takes longer than the others can wait for, or it loops for ever.",
            f"look at that line, on that rank's data. {advice_on(one).longer(one)}",
        )
    return _silent(one) if one.state == "silent" else _stuck(one)


def _stuck(one: Testimony) -> Remedy:
    advice = advice_on(one)
    longer = advice.longer(one)
    if one.workers:
        busy = [worker for worker in one.workers if worker.stack] or list(one.workers)
        pids = ", ".join(str(worker.pid) for worker in busy)
        return Remedy(
            "stuck waiting for a loader process",
            f"the data set does not return in a loader process (process {pids}).",
            "look at that line. Where none is known: a process forked while a thread held a lock may wait for it for "
            'ever; use multiprocessing_context="spawn" in a DataLoader of your own. '
            f"{advice.loader_timeout} makes such a wait an error. {longer}",
        )
    frame = one.user_frame
    inner = one.stack[-1].file if one.stack else ""
    line = frame.source if frame and frame == one.stack[-1] else ""  # else something was called there
    if inner.endswith(_LOCK_FILES) or any(call in line for call in _LOCK_CALLS):
        return Remedy(
            "stuck",
            "it waits for a lock, a queue, a thread or a process that does not let it go on.",
            f"look at who holds it: another thread of this rank, or a callback that takes it twice. {longer}",
        )
    return Remedy(
        "stuck",
        "that line does not return: it waits for something outside training (a file, the network, another process, a "
        "file that another rank is to write), or it loops for ever.",
        f"look at that line, on that rank's data. {longer}",
    )


def _silent(one: Testimony) -> Remedy:
    if one.process_state == "T":
        return Remedy(
            "stopped",
            "something sent it SIGSTOP: `kill -STOP`, Ctrl-Z, a scheduler that suspends jobs.",
            f"find out who; `kill -CONT {one.pid}` would have let it go on. {advice_on(one).to_look_into}",
        )
    if one.process_state == "gone":
        return Remedy("gone", "its process ended without a word.", "read the last lines of its log.")
    if one.process_state == "D":
        return Remedy(
            "not answering (the kernel has it in an uninterruptible wait)",
            "a disk or a network file system that does not answer.",
            "look at `dmesg` and at the file systems of that machine.",
        )
    if one.process_state == "":
        return Remedy(
            "not answering",
            "its machine is down or cut off, or its process is stopped or holds the interpreter.",
            f"look at {one.host}: is it up, is process {one.pid} there (`ps`), what does `py-spy dump` say?",
        )
    return Remedy(
        "holding the interpreter",
        "a C or C++ call that keeps Python's interpreter lock (GIL) and does not return: no other thread of that rank "
        "can run.",
        "release the lock in that extension (pybind11: gil_scoped_release; ctypes: CDLL in place of PyDLL), or run the "
        "call in a process of its own.",
    )
