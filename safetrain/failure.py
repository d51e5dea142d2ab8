"""What went wrong on one rank: a record that it writes to its own file before it leaves; no collective is involved.

Whoever is left draws the verdict from the records (failed.py): the launcher, or under torchrun the failing rank itself.
"""

from __future__ import annotations

import json
import os
import re
import site
import socket
import sysconfig
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from safetrain.errors import PeerFailed, RankFailed, RanksDiffer, SafetrainError

_LOG_BYTES = 1 << 16  # of a log, from its end: a crash report and more
_PACKAGE = Path(__file__).parent
_LIBRARIES = tuple(
    path + os.sep
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        site.getusersitepackages(),
    )
)
_FILE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class Failure:
    """Why one rank ended.

    Attributes:
        step: optimizer steps done; None where the loop was not yet, or no longer, running.
        phase: what the rank was doing, such as ``training_step``.
        place: ``file:line`` of the user's code, as far in as it goes; empty where none was involved.
        traceback: from the user's first frame on.
        time_ns: since the epoch, on the rank's own clock.
        victim: the rank was healthy; it ended because another one failed.
        culprits: the ranks that failed, where a victim was told which; the odd ones out, where ranks differ.
        batch: the batch that was at hand, in words; ``samples``: all of its keys in the dataset.
        kept: what became of the state of the last whole step, in words.
        remedy: what to change before the run can go on from there.
        collectives: the rank's last ones (flight_recorder.Collective), where they could be had.
    """

    rank: int
    host: str
    pid: int
    step: int | None
    phase: str
    place: str
    error: str
    message: str
    traceback: str
    time_ns: int
    victim: bool
    culprits: list[int] = field(default_factory=list)
    batch: str = ""
    samples: list[int | str] = field(default_factory=list)
    kept: str = ""
    remedy: str = ""
    collectives: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException, rank: int, *, victim: bool) -> Self:
        """The record of ``error``, which ended ``rank`` just now."""
        failed = error if isinstance(error, RankFailed) else None
        root = error.__cause__ if failed and error.__cause__ else error
        if root.__cause__ is not None and "DataLoader worker" in str(root.__cause__):
            root = root.__cause__  # torch says the same again, without the signal
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=getattr(error, "step", None),
            phase=failed.phase if failed else "",
            place=_place(root),
            error=type(root).__name__,
            message=str(root),
            traceback=user_traceback(root),
            time_ns=time.time_ns(),
            victim=victim or isinstance(error, PeerFailed),
            culprits=list(error.ranks) if isinstance(error, (PeerFailed, RanksDiffer)) else [],
            batch=failed.work.in_words() if failed and failed.work else "",
            samples=failed.work.samples if failed and failed.work else [],
            kept=error.kept if isinstance(error, SafetrainError) else "",
            remedy=error.remedy if isinstance(error, SafetrainError) else "",
        )

    def write(self, run_dir: Path) -> None:
        """Write the record to ``run_dir/failures/rank_<n>.json``; a reader never sees half of it."""
        path = _record_path(run_dir, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{self.pid}.tmp")
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(path)


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended, as its parent saw it.

    Attributes:
        code: negative for a signal; None where nobody knows any more.
        last_seen: where the rank was shortly before, such as ``in training_step at step 5``; empty where not known.
        host, log: its machine, and the end of its log, where the job runs on several.
    """

    rank: int
    pid: int
    code: int | None
    last_seen: str = ""
    host: str = ""
    log: str = ""


def read_failures(run_dir: Path) -> list[Failure]:
    """The records of a run, by rank."""
    paths = (run_dir / "failures").glob("rank_*.json")
    return sorted((Failure(**json.loads(path.read_text())) for path in paths), key=lambda failure: failure.rank)


def await_records(run_dir: Path, ranks: Iterable[int], limit_s: float) -> None:
    """Return when each of ``ranks`` has written its record, or after ``limit_s``.

    A victim calls it before it leaves: the launcher ends all ranks as soon as the first is gone, and that must not cost
    the culprit's record.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not all(_record_path(run_dir, rank).exists() for rank in ranks):
        time.sleep(0.01)


def user_traceback(error: BaseException) -> str:
    """The traceback without the frames before the user's own first one; whole where no frame is the user's."""
    story = traceback.TracebackException.from_exception(error)
    chain: traceback.TracebackException | None = story
    while chain is not None:
        users = [index for index, frame in enumerate(chain.stack) if is_user_file(frame.filename)]
        if users:
            del chain.stack[: users[0]]
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return "".join(story.format()).rstrip()


def is_user_file(file: str) -> bool:
    """Neither Python's, nor an installed library's, nor safetrain's own; a shipped recipe counts as the user's."""
    if file.startswith("<"):
        return False
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_PACKAGE / "recipes")
    return not file.startswith(_LIBRARIES)


def _place(error: BaseException) -> str:
    """The innermost line of the user's; a loader process has put its own traceback into the message."""
    link: BaseException | None = error
    while link is not None:
        in_rank = [
            f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(link.__traceback__) if is_user_file(f.filename)
        ]
        in_loader = user_lines(str(link))
        if users := [*in_rank, *in_loader]:
            return users[-1]
        link = link.__cause__
    return ""


def user_lines(text: str) -> list[str]:
    """``file:line`` of the user's frames in a traceback, or a crash report, in the order in which they stand there."""
    return [f"{found['file']}:{found['line']}" for found in _FILE_LINE.finditer(text) if is_user_file(found["file"])]


def headline(message: str) -> str:
    """The line of a message that says most: the first; the last where a loader process' traceback stands before it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "(no message)"
    return lines[-1].partition(": ")[2] or lines[-1] if _FILE_LINE.search(message) else lines[0]


def _record_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "failures" / f"rank_{rank}.json"


def log_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return run_dir / "logs" / f"rank_{rank}.log"


def log_end(run_dir: Path, rank: int) -> str:
    """The last of a rank's output that is worth reading."""
    try:
        with log_path(run_dir, rank).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
