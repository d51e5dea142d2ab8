"""Where a process is: the Python stack of a thread of this one, and of another one on this machine that cannot answer.

A process that holds the interpreter runs no other Python thread, but a signal still reaches it: faulthandler, in C,
writes its stack into a file in memory, which others find under /proc. Nothing is on a disk, so none can be full.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetrain.failure import is_user_file

_LINUX = sys.platform == "linux"
_FILE_NAME = "safetrain-stacks"
_SIGNAL_OFFSET = 9  # a real-time signal: nobody else uses it
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_ANSWER_LIMIT_S = 0.3
_ENTRIES = {("safetrain", "trainer.py", "fit"), ("_utils", "worker.py", "_worker_loop")}  # the latter: torch's loader

_file: int | None = None


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line itself, where its file can be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def stack_of(thread_id: int) -> tuple[Frame, ...]:
    """The stack of one thread of this process, innermost last; empty where the thread is gone."""
    frames: list[Frame] = []
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(frames))


def user_frame(stack: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's code, within ``fit`` (or, in a loader process, within its loop)."""
    for frame in reversed(tuple(stack)):
        if is_user_file(frame.file):
            return frame
        if (*Path(frame.file).parts[-2:], frame.function) in _ENTRIES:
            return None
    return None


def answer_signals() -> None:
    """Have this process answer ``ask``, from now on, whatever it does. A forked child calls it again for itself."""
    global _file
    if not _LINUX:
        return
    before, _file = _file, os.memfd_create(_FILE_NAME)
    faulthandler.register(_signal(), file=_file, all_threads=False)
    if before is not None:
        os.close(before)


def ask(pid: int) -> tuple[Frame, ...]:
    """The stack of another process on this machine, innermost last; empty where it does not answer."""
    file = _file_of(pid)
    if file is None:
        return ()
    try:
        size = file.stat().st_size
        os.kill(pid, _signal())
        deadline, text, before = time.monotonic() + _ANSWER_LIMIT_S, "", ""
        while time.monotonic() < deadline and not (text and text == before):
            time.sleep(0.02)
            text, before = file.read_text(errors="replace")[size:], text
    except OSError:  # it ended meanwhile, or is another user's
        return ()
    return tuple(Frame(f["file"], int(f["line"]), f["function"]) for f in reversed(list(_FRAME.finditer(text))))


ENDED = ("", "Z", "X")
"""What ``state_of`` says of a process that has ended."""


def state_of(pid: int) -> str:
    """The kernel's letter for a process of this machine: R, S, D, T (stopped), t (in a debugger), Z; empty: gone.

    ``?`` where the system has no /proc.
    """
    if not _LINUX:
        return "?"
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def answering_children() -> list[int]:
    """The processes that this one has forked and that answer ``ask``: loader workers."""
    if not _LINUX:
        return []
    found: list[int] = []
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in children.read_text().split()]
        except OSError:  # a thread that ended
            continue
    return sorted(pid for pid in found if _file_of(pid) is not None)


def _file_of(pid: int) -> Path | None:
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).startswith(f"/memfd:{_FILE_NAME}"):
                return link
    except OSError:
        pass
    return None


def _signal() -> int:
    return signal.SIGRTMIN + _SIGNAL_OFFSET
