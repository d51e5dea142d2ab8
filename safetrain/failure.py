"""What went wrong: one record for each rank that failed, and one summary for the person who has to act on it.

A failing rank writes its record to its own file and leaves; no collective is involved. The summary is written from the
records, and from how the processes ended, by whoever is left: the launcher, or under torchrun the failing rank itself.
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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from safetrain import causes
from safetrain.errors import PeerFailed, RankFailed, RanksDiffer
from safetrain.words import ranks_in_words

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
        culprits: the ranks that failed, where a victim was told which.
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
            culprits=list(error.ranks) if isinstance(error, PeerFailed) else [],
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
    """

    rank: int
    pid: int
    code: int | None
    last_seen: str = ""


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
    if (verdict := run_dir / "failure.json").exists():  # the watchdog ended the job: it has said all
        return str(json.loads(verdict.read_text())["text"])
    failures = read_failures(run_dir)
    silent = _silent(failures, exits)
    culprit = first_failure(failures)
    witness = next((f for f in failures if f.culprits), None) if culprit is None else None
    if culprit is None and witness is None and not silent:  # nobody says why: the first to suffer is the best there is
        culprit = min(failures, key=lambda f: f.time_ns, default=None)
    if witness is not None:
        lines, told, logs = _tell_for(witness), list(witness.culprits), list(witness.culprits)
    elif culprit is not None:
        others = [f for f in failures if f is not culprit and not f.victim]
        same = [f for f in others if (f.error, f.message) == (culprit.error, culprit.message)]
        lines = _tell(culprit, [f.rank for f in same])
        lines += [line for f in others if f not in same for line in _tell_briefly(f)]
        told, logs = sorted({culprit.rank, *(f.rank for f in others)}), [culprit.rank]
        if culprit.error == RanksDiffer.__name__:
            told = list(range(world_size))
    else:
        lines = [line for e in silent for line in _tell_exit(e, run_dir)] or ["Training failed; no rank says why."]
        told = logs = [e.rank for e in silent]
    victims = [rank for rank in range(world_size) if rank not in told]
    if victims and told:
        lines.append(f"{ranks_in_words(victims).capitalize()} did not fail: ended because {ranks_in_words(told)} did.")
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
    if failure.error == RanksDiffer.__name__:  # no rank failed; which of them is right, nobody knows
        return [f"Training ended at {failure.message}", ""]
    who = f"rank {failure.rank}" if not same else ranks_in_words(sorted({failure.rank, *same}))
    lines = [f"Training failed on {who}{when}{doing} ({failure.host}, process {failure.pid}).", ""]
    if failure.place:
        lines.append(f"  {failure.place}")
    lines += [f"  {failure.error}: {_headline(failure.message)}", ""]
    if meaning := causes.of_error(failure.error, failure.message):
        lines += [f"What it means: {meaning}", ""]
    if failure.place:
        lines += [f"Traceback of rank {failure.rank}, from your code on:", failure.traceback, ""]
    else:
        lines += ["None of your code was running; the traceback is in the log.", ""]
    return lines


def _tell_for(witness: Failure) -> list[str]:
    """A failure in the words of another rank: the culprit could not write its own record."""
    lines = [f"Training failed: {witness.message}.", ""]
    if meaning := causes.of_error("", witness.message):
        lines += [f"What it means: {meaning}", ""]
    who = ranks_in_words(witness.culprits).capitalize()
    return [*lines, f"{who} could leave no record of its own; rank {witness.rank} was told.", ""]


def _tell_briefly(failure: Failure) -> list[str]:
    place = f" at {failure.place}" if failure.place else ""
    return [f"Rank {failure.rank} failed too{place}: {failure.error}: {_headline(failure.message)}", ""]


def _tell_exit(ended: Exit, run_dir: Path) -> list[str]:
    lines = [f"Training failed: rank {ended.rank} (process {ended.pid}) {causes.of_exit(ended.code)}", ""]
    if ended.last_seen:
        lines += [f"A moment before it was {ended.last_seen}.", ""]
    log = _log_path(run_dir, ended.rank)
    text = log.read_text(errors="replace") if log.exists() else ""
    if crash := causes.crash_in(text):
        lines += ["Where it crashed, innermost first:", *(f"  {line}" for line in crash), ""]
    elif text:
        lines += [
            f"The last lines of rank {ended.rank}'s log:",
            *(f"  {x}" for x in text.splitlines()[-_LOG_LINES:]),
            "",
        ]
    return lines


def _headline(message: str) -> str:
    """The line of a message that says most: the first; the last where a loader process' traceback stands before it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "(no message)"
    return lines[-1].partition(": ")[2] or lines[-1] if _FILE_LINE.search(message) else lines[0]


def _record_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "failures" / f"rank_{rank}.json"


def _log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank_{rank}.log"
