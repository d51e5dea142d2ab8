"""What went wrong: one record for each rank that failed, and one summary for the person who has to act on it.

A failing rank writes its record to its own file and leaves; no collective is involved. The summary is written from the
records, and from how the processes ended, by whoever is left: the launcher, or under torchrun the failing rank itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import site
import socket
import sysconfig
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from safetrain.errors import PeerFailed, RankFailed

_PACKAGE = Path(__file__).parent
_LIBRARIES = tuple(
    path + os.sep
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        site.getusersitepackages(),
    )
)
_FILE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LOG_LINES = 8


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

    @classmethod
    def of(cls, error: BaseException, rank: int, *, victim: bool) -> Self:
        """The record of ``error``, which ended ``rank`` just now."""
        failed = error if isinstance(error, RankFailed) else None
        root = error.__cause__ if failed and error.__cause__ else error
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
    """How a rank's process ended, as its parent saw it; ``code`` is negative for a signal."""

    rank: int
    pid: int
    code: int


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


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure that is not another one's consequence; None where there is none."""
    return min((f for f in failures if not f.victim), key=lambda f: f.time_ns, default=None)


def summary(run_dir: Path, world_size: int, exits: Sequence[Exit] = ()) -> str:
    """The whole story, culprit first, for a terminal and for ``failure.txt``.

    ``exits`` are the ranks that ended by themselves, not by the launcher's hand after another one's failure.
    """
    failures = read_failures(run_dir)
    silent = _silent(failures, exits)
    culprit = first_failure(failures)
    if culprit is None and not silent:  # nobody says why: the first to suffer is the best there is
        culprit = min(failures, key=lambda f: f.time_ns, default=None)
    if culprit is not None:
        others = [f for f in failures if f is not culprit and not f.victim]
        same = [f for f in others if (f.error, f.message) == (culprit.error, culprit.message)]
        lines = _tell(culprit, [f.rank for f in same])
        lines += [line for f in others if f not in same for line in _tell_briefly(f)]
        told, logs = sorted({culprit.rank, *(f.rank for f in others)}), [culprit.rank]
    else:
        lines = [line for e in silent for line in _tell_exit(e, run_dir)] or ["Training failed; no rank says why."]
        told = logs = [e.rank for e in silent]
    victims = [rank for rank in range(world_size) if rank not in told]
    if victims and told:
        lines.append(f"{_ranks(victims).capitalize()} did not fail: ended because {_ranks(told)} did.")
    lines += [f"Log of rank {rank}: {_log_path(run_dir, rank)}" for rank in logs]
    return "\n".join(lines) + "\n"


def _silent(failures: Sequence[Failure], exits: Sequence[Exit]) -> list[Exit]:
    """The ranks that ended without a record, those with an error code before those without."""
    recorded = {failure.rank for failure in failures}
    unrecorded = [e for e in exits if e.rank not in recorded]
    return [e for e in unrecorded if e.code != 0] or unrecorded


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
        in_rank = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(link.__traceback__)]
        in_loader = [(found["file"], found["line"]) for found in _FILE_LINE.finditer(str(link))]
        users = [f"{file}:{line}" for file, line in (*in_rank, *in_loader) if is_user_file(file)]
        if users:
            return users[-1]
        link = link.__cause__
    return ""


def _tell(failure: Failure, same: Sequence[int]) -> list[str]:
    when = "" if failure.step is None else f" at step {failure.step}"
    doing = f" in {failure.phase}" if failure.phase else ""
    who = f"rank {failure.rank}" if not same else _ranks(sorted({failure.rank, *same}))
    lines = [f"Training failed on {who}{when}{doing} ({failure.host}, process {failure.pid}).", ""]
    if failure.place:
        lines.append(f"  {failure.place}")
    lines += [f"  {failure.error}: {_headline(failure.message)}", ""]
    lines += [f"Traceback of rank {failure.rank}, from your code on:", failure.traceback, ""]
    return lines


def _tell_briefly(failure: Failure) -> list[str]:
    place = f" at {failure.place}" if failure.place else ""
    return [f"Rank {failure.rank} failed too{place}: {failure.error}: {_headline(failure.message)}", ""]


def _tell_exit(ended: Exit, run_dir: Path) -> list[str]:
    lines = [f"Training failed: rank {ended.rank} {_how(ended)}", ""]
    log = _log_path(run_dir, ended.rank)
    if log.exists() and (last := log.read_text(errors="replace").splitlines()[-_LOG_LINES:]):
        lines += [f"The last lines of rank {ended.rank}'s log:", *(f"  {line}" for line in last), ""]
    return lines


def _how(ended: Exit) -> str:
    process = f"(process {ended.pid})"
    if ended.code == -signal.SIGKILL:
        return (
            f"{process} was killed by SIGKILL. As a rule the machine ran out of memory (`dmesg | grep -i kill` tells); "
            "else a person or a scheduler ended it."
        )
    if ended.code < 0:
        return (
            f"{process} was ended by {signal.Signals(-ended.code).name}: a crash in native code, or a signal "
            "from outside. Its log may hold a stack."
        )
    if ended.code == 0:
        return f"{process} left with exit code 0 before the others were done: look for os._exit in your code."
    return (
        f"{process} left with exit code {ended.code} and without an exception: look for os._exit({ended.code}) "
        "in your code, or for a library that ends the process."
    )


def _headline(message: str) -> str:
    """The line of a message that says most: the first; the last where a loader process' traceback stands before it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "(no message)"
    return lines[-1].partition(": ")[2] or lines[-1] if _FILE_LINE.search(message) else lines[0]


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0-3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _record_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "failures" / f"rank_{rank}.json"


def _log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank_{rank}.log"
