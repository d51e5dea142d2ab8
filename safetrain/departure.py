"""How a process leaves on a verdict: told, written, gone; whatever the disk, the terminal and other threads do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from safetrain import rank_log
from safetrain.verdict import Verdict

_FLUSH_S = 0.5  # the thread that trains may hold the lock of a stream for ever


def publish(verdict: Verdict, run_dir: Path | None, *, tells: bool) -> None:
    """Write ``failure.json`` and ``failure.txt``, and print the verdict where nobody else will read and print them."""
    text = verdict.text(run_dir)
    if run_dir is not None:
        try:
            _write_once(run_dir / "failure.json", verdict.to_json(run_dir))
            _write_once(run_dir / "failure.txt", text)
        except FileExistsError:  # another rank, that could not be asked, was first
            pass
        except OSError as error:
            text = f"{verdict.text(None)}\n{run_dir} takes no file: {error}\n"
            tells = True
    if tells:
        _within(_FLUSH_S, lambda: _print(text))


def leave_now(silent: Iterable[int] = ()) -> NoReturn:
    """End this process, and those of ``silent`` (process ids on this machine), which cannot do it themselves."""
    for pid in silent:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    _within(_FLUSH_S, rank_log.flush)
    os._exit(1)


def _write_once(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)


def _print(text: str) -> None:
    rank_log.flush()
    stream = rank_log.terminal()
    stream.write(text)
    stream.flush()


def _within(limit_s: float, action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)
