"""The directory of a run: a new one for each job, or, for a job that resumes, that of the run it goes on with."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetrain.errors import UsageError

logger = logging.getLogger("safetrain")

_CHECKPOINTS, _LOCK = "checkpoints", ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_passed_over: dict[Path, str] = {}  # by the run directory that was chosen


def choose_run_dir(parent: str, resume: str = "none") -> str:
    """Where a job writes; the folder exists.

    ``resume`` is ``auto``: the run below ``parent`` that was the last to save, of those that no job is working on. It
    is the directory of a run: that one. Else, or where there is no such run, a new ``parent/<date>_<time>``.
    """
    if resume == "auto":
        found, newest = _last_saved(Path(parent)), _last_begun(Path(parent))
        chosen = _new(Path(parent)) if found is None else str(found)
        goes_on = "it begins anew" if found is None else f"going on with {shown(found)}"
        _passed_over[Path(chosen).absolute()] = (
            "" if newest in (None, found) else f"{shown(newest)} {_why_not(newest)}: {goes_on}"
        )
        return chosen
    if resume != "none" and (Path(resume) / _CHECKPOINTS).is_dir():
        return resume
    return _new(Path(parent))


def passed_over(run_dir: Path) -> str:
    """Why ``resume=auto`` did not take the run that began last but ``run_dir``, in a line; empty where it did."""
    return _passed_over.get(run_dir.absolute(), "")


def shown(path: Path) -> str:
    """``path`` as a person here would write it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@contextmanager
def occupied(run_dir: Path) -> Iterator[None]:
    """Keep other jobs out of ``run_dir``; the system lets go of it if this process dies, however it does.

    Raises:
        UsageError: another job is working on it.
    """
    with (run_dir / _LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:  # a network file system without them
                logger.info("%s can't be locked (%s): see to it that no other job writes there", run_dir, error)
                yield
                return
            if not isinstance(error, BlockingIOError):
                raise
            lock.seek(0)
            raise UsageError(
                f"another job ({lock.read() or 'just starting'}) is working in {run_dir}: wait until it has ended, or "
                "choose another run_dir"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        yield


def note_for_restart(run_dir: str) -> None:
    """Under torchrun: where the ranks go on if it starts them again (``--max-restarts``)."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _note().write_text(run_dir)


def forget_restart() -> None:
    """The ranks have done their work: nobody will start them again."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _note().unlink(missing_ok=True)


def run_before_restart() -> str:
    """Where the ranks were before torchrun started them again, if they had saved anything; else empty."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not _note().exists():
        return ""
    run_dir = _note().read_text()
    return run_dir if any(Path(run_dir, _CHECKPOINTS).glob("step_*")) else ""


def _note() -> Path:
    """One for each agent, written anew when it starts ranks for the first time."""
    return Path(tempfile.gettempdir(), f"safetrain_{os.environ['TORCHELASTIC_RUN_ID']}_{os.getppid()}")


def _new(parent: Path) -> str:
    """Make ``parent/<date>_<time>``, a new one even where another job took that name in this second."""
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    attempt = 1
    while True:
        claimed = parent / (stamp if attempt == 1 else f"{stamp}_{attempt}")
        try:
            claimed.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return str(claimed)


def _last_saved(parent: Path) -> Path | None:
    saved = sorted(parent.glob(f"*/{_CHECKPOINTS}"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    return next((folder.parent for folder in saved if any(folder.glob("step_*")) and not _in_use(folder.parent)), None)


def _last_begun(parent: Path) -> Path | None:
    """The run whose job was the last to write its config."""
    begun = sorted(parent.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime)
    return begun[-1].parent if begun else None


def _why_not(run_dir: Path) -> str:
    if not any((run_dir / _CHECKPOINTS).glob("step_*")):
        return "has no checkpoint"
    return "is another job's at this time" if _in_use(run_dir) else "was not the last to save"


def _in_use(run_dir: Path) -> bool:
    """Looks only: it does not say that it was here."""
    try:
        with (run_dir / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
