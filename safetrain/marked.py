"""Output of several jobs on one terminal: every line of a job says whose it is."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_DRAIN_LIMIT_S = 1.0  # a process that is not gone yet may hold the pipe open


@contextmanager
def marked_output(mark: str) -> Iterator[None]:
    """Put ``mark`` before every line that this process, and those it starts, write to standard output and error.

    They then write into pipes, and no progress bar is drawn.
    """
    streams = [_Marked(fd, mark.encode()) for fd in (1, 2)]
    try:
        yield
    finally:
        for stream in streams:
            stream.end()


class _Marked:
    def __init__(self, fd: int, mark: bytes) -> None:
        _flush()
        self._fd, self._mark, self._terminal = fd, mark, os.dup(fd)
        reader, writer = os.pipe()
        os.dup2(writer, fd)
        os.close(writer)
        self._copier = threading.Thread(target=self._copy, args=(reader,), name="safetrain-marked", daemon=True)
        self._copier.start()

    def end(self) -> None:
        _flush()
        os.dup2(self._terminal, self._fd)
        self._copier.join(_DRAIN_LIMIT_S)

    def _copy(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                os.write(self._terminal, self._mark + line.rstrip(b"\n") + b"\n")  # one call: lines stay whole
        os.close(self._terminal)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
