"""Where a rank's output goes: all of it into ``logs/rank_<n>.log``, and rank 0's to the terminal too.

The file is the truth. File descriptors 1 and 2 point at it, so prints, logging, C libraries and child processes land in
it at once and in order, however the process ends. The terminal is a window on it: on rank 0 a thread copies what the
file gains to the terminal, above the progress bar. Of the other ranks it shows what they log as warnings or errors,
marked ``[rank n]``.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

_FOLLOW_EVERY_S = 0.1  # as late as rank 0's output may be on the terminal; a look costs 20 µs
_TEXTS_REMEMBERED = 1000
LOG_ONLY = "safetrain.log_only"  # the logger of lines that nobody needs to see come
_NOT_SHOWN = re.compile(rb"^.* INFO safetrain\.log_only: .*\n", re.MULTILINE)

_live: RankLog | None = None
_step_aside: Callable[[], AbstractContextManager[None]] = nullcontext


def redirect_output(run_dir: Path, rank: int, *, logging_too: bool = True) -> RankLog:
    """Send this process' output to ``run_dir/logs/rank_<rank>.log`` from now until it ends. Call it once, early.

    ``logging_too``: set up Python's logging, which a script that is not ours does itself.

    A process that leaves by ``os._exit`` calls ``flush()`` first.
    """
    global _live
    _live = RankLog(run_dir / "logs" / f"rank_{rank}.log", rank)
    if logging_too:
        _configure_logging(None if rank == 0 else _WarningsOnTerminal(_live.terminal, rank))
    return _live


def say(text: str) -> None:
    """Print a line for the person who watches: above the progress bar, and into the log where there is one."""
    with _step_aside() if _live is None else nullcontext():
        print(text, file=sys.stderr, flush=True)


def fresh_line(stream: TextIO) -> str:
    """What to write first where another process' progress bar may stand on the line."""
    return "\r\x1b[K" if stream.isatty() else ""


def complain(about: object) -> None:
    """Tell the person who watches what went wrong; for the launcher, beside whose ranks' progress bar it may stand."""
    print(f"{fresh_line(sys.stderr)}{str(about).rstrip()}", file=sys.stderr, flush=True)


def terminal() -> TextIO:
    """The stream of the person who watches, whatever was redirected."""
    return sys.stderr if _live is None else _live.terminal


def flush() -> None:
    """Return when what this process has printed is where it goes."""
    if _live is None:
        _flush_standard_streams()
    else:
        _live.flush()


def set_progress_bar(step_aside: Callable[[], AbstractContextManager[None]] | None) -> None:
    """Tell how the progress bar on the terminal makes room for a line above it; None when there is no bar any more."""
    global _step_aside
    _step_aside = step_aside or nullcontext


class Repeats:
    """Lets a text through the first time, and then the 10th, the 100th, ... time."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def pass_on(self, text: str) -> str | None:
        """The text as it is to be shown, or None when it is not to be shown again."""
        if len(self._counts) > _TEXTS_REMEMBERED:
            self._counts.clear()
        count = self._counts[text] = self._counts.get(text, 0) + 1
        if count == 1:
            return text
        return f"{text} ({count} times so far)" if str(count).strip("0") == "1" else None


class RankLog:
    """One rank's log file, in place of the process' standard output and error.

    Attributes:
        path: the log file; an earlier one is continued.
        terminal: the process' standard error as it was before.
    """

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _flush_standard_streams()
        self.path = path
        self.terminal: TextIO = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace")
        self._window = os.fdopen(os.dup(1), "wb")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._reader = path.open("rb")
        self._reader.seek(0, os.SEEK_END)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        self._unfinished_line = b""
        self._copying = threading.Lock()
        self._followed = rank == 0
        if self._followed:
            threading.Thread(target=self._follow, name="safetrain-terminal", daemon=True).start()
        atexit.register(self.flush)
        os.register_at_fork(after_in_child=self._leave_it_to_the_parent)

    def flush(self) -> None:
        """Return when everything written so far is in the file and, on rank 0, on the terminal."""
        _flush_standard_streams()
        self._copy(whole_lines=False)

    def stop_following(self) -> None:
        """What comes from now on goes into the file only."""
        self.flush()
        self._followed = False

    def _follow(self) -> None:
        tick = threading.Event()
        while self._followed:
            tick.wait(_FOLLOW_EVERY_S)
            # text without a line end would be overwritten by a bar; where there is none it may be a prompt
            self._copy(whole_lines=_step_aside is not nullcontext)

    def _leave_it_to_the_parent(self) -> None:
        self._followed = False  # what a child writes is in the file as well, and so is where the reader stands

    def _copy(self, whole_lines: bool) -> None:
        if not self._followed:
            return
        with self._copying:
            text = self._unfinished_line + self._reader.read()
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 if whole_lines else len(text)
            text, self._unfinished_line = _NOT_SHOWN.sub(b"", text[:end]), text[end:]
            if not text:
                return
            try:
                with _step_aside():
                    self._window.write(text)
                    self._window.flush()
            except OSError:  # nobody watches any more (a closed pipe, a terminal that hung up); the file goes on
                self._followed = False


class _WarningsOnTerminal(logging.Handler):
    """Shows a rank's warnings and errors beside rank 0's output."""

    def __init__(self, terminal: TextIO, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal
        self._mark = f"{fresh_line(terminal)}[rank {rank}] "
        self._repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        text = self._repeats.pass_on(f"{record.levelname} {record.name}: {record.getMessage()}")
        if text is None:
            return
        try:
            self._terminal.write(f"{self._mark}{text}\n")
            self._terminal.flush()
        except OSError:
            self.handleError(record)


def _configure_logging(on_terminal: logging.Handler | None) -> None:
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    into_file = logging.StreamHandler()
    into_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(into_file)
    if on_terminal is not None:
        root.addHandler(on_terminal)


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
