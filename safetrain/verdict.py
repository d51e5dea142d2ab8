"""The verdict: why a job ended, in words for people and in a form for programs, the same whatever ended it.

``failed.py`` draws it from the records and exits of ranks that failed, ``stalled.py`` from what ranks say that stand
still.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from safetrain import __version__, machine, page
from safetrain.failure import is_user_file
from safetrain.injection import marked_as_trial
from safetrain.orders import FAILED, Published
from safetrain.shelf import Shelf
from safetrain.stacks import Frame

_LOGS_TOLD = 4
_FILES = ("failure.txt", "failure.json", page.NAME, "failures")
"""What is known of a failure: the text, the facts, the page, and the folder of the ranks' own records."""


@dataclass(frozen=True)
class Verdict:
    """Why a job ended, culprit first.

    Attributes:
        sentence: which rank, where and when, did or failed to do what.
        culprits: the ranks at fault.
        place: the line of the user's, empty where none is known; ``detail`` is what is there: the line, or the error.
        batch: which samples were at hand.
        others: what the other ranks do or did, one sentence for all that do the same.
        kept: what became of the state of the last whole step, or which checkpoint there is.
        cause, remedy: what it usually comes from and what to do; empty where ``detail`` says enough.
        evidence: lines to read on: a traceback, a stack, the end of a log.
        ranks: what all this is drawn from: a dataclass for each rank that is known of.
        world_size: how many ranks the job had; 0: those in ``ranks`` are all.
        exit_code: the job's; that of a preempted one (75) says: run it again. torchrun leaves with 1 in any case.
    """

    sentence: str
    culprits: tuple[int, ...] = ()
    place: str = ""
    detail: str = ""
    batch: str = ""
    others: tuple[str, ...] = ()
    kept: str = ""
    cause: str = ""
    remedy: str = ""
    evidence: tuple[str, ...] = ()
    ranks: tuple[Any, ...] = ()
    world_size: int = 0
    exit_code: int = 1

    def text(self, run_dir: Path | None) -> str:
        """For a terminal, and for ``failure.txt``."""
        paragraphs = [
            [self.sentence],
            [f"  {self.place}" if self.place else "", f"    {self.detail}" if self.detail else ""],
            [f"{self.batch[0].upper()}{self.batch[1:]}." if self.batch else ""],
            self.others,
            [self.kept],
            [f"Likely cause: {self.cause}" if self.cause else "", f"What to do: {self.remedy}" if self.remedy else ""],
            self.evidence,
            [] if run_dir is None else self._where_the_rest_is(run_dir),
        ]
        filled = ["\n".join(line for line in lines if line) for lines in paragraphs]
        return marked_as_trial("\n\n".join(text for text in filled if text) + "\n")

    def _where_the_rest_is(self, run_dir: Path) -> Sequence[str]:
        logs = [(rank, run_dir / "logs" / f"rank_{rank}.log") for rank in self.culprits[:_LOGS_TOLD]]
        known = f"{run_dir / page.NAME} (for programs: {_json_path(run_dir).name})"
        return [
            *(f"Log of rank {rank}: {log}" for rank, log in logs if log.exists()),
            *([f"All that is known of every rank: {known}"] if self.ranks else []),
        ]

    def to_json(self, run_dir: Path) -> str:
        """For programs: all of it, and the text."""
        return _to_json(self._facts(run_dir))

    def _facts(self, run_dir: Path) -> dict[str, Any]:
        versions = {"safetrain": __version__, "torch": torch.__version__, "python": platform.python_version()}
        facts = {"text": self.text(run_dir), "time_ns": time.time_ns(), "versions": versions, **asdict(self)}
        facts["machine"] = machine.identity()
        _note_user_code(facts["ranks"])
        return _without_infinities(facts)

    def publish(self, run_dir: Path | None) -> str | None:
        """Write ``failure.json``, ``failure.txt`` and the page; the text to show. None: another process was first.

        A directory that takes no file costs the files, not the text.
        """
        if run_dir is None:
            return self.text(None)
        if self.exit_code == FAILED and not self.kept:
            return replace(self, kept=last_checkpoint(run_dir))._write(run_dir)
        return self._write(run_dir)

    def _write(self, run_dir: Path) -> str | None:
        facts = self._facts(run_dir)
        try:
            with _json_path(run_dir).open("x") as file:
                file.write(_to_json(facts))
            (run_dir / "failure.txt").write_text(self.text(run_dir))
        except FileExistsError:
            return None
        except OSError as error:
            with suppress(OSError):
                _json_path(run_dir).unlink()  # half a file says nothing
            return f"{self.text(None)}\n{run_dir} takes no file: {error}\n"
        if self.exit_code == FAILED:
            with suppress(OSError):  # the text and the facts are there
                page.write(run_dir, facts)
        return self.text(run_dir)


def last_checkpoint(run_dir: Path) -> str:
    """Where a run can go on, in words; empty where it has saved nothing that is good."""
    saved = newest_checkpoint(run_dir)
    return f"The last checkpoint is {saved}: go on with resume=auto." if saved else ""


def newest_checkpoint(run_dir: Path) -> str:
    """Its name; empty where there is none."""
    saved = Shelf(run_dir / "checkpoints").readable()
    return saved[0][0].name if saved else ""


def published(run_dir: Path) -> Published | None:
    """The verdict that is in ``run_dir``; None where there is none, or only half of one."""
    with suppress(OSError, ValueError):  # who wrote it may have been killed at that
        facts = json.loads(_json_path(run_dir).read_text())
        return Published(facts["text"], facts["exit_code"])
    return None


def told_by(run_dir: Path) -> str:
    """The identity of the machine on whose terminal the verdict in ``run_dir`` was told."""
    with suppress(OSError, ValueError):
        return str(json.loads(_json_path(run_dir).read_text())["machine"])
    return ""


def put_away(run_dir: Path) -> None:
    """Make way for the next verdict: one on a failure stays, as ``failure_1.txt`` or the next number."""
    told = published(run_dir)
    if told is None or told.exit_code != FAILED:  # half of one, or the run was told to leave
        _forget(run_dir)
        return
    numbered = (
        [path.with_name(f"{path.stem}_{number}{path.suffix}") for path in map(run_dir.joinpath, _FILES)]
        for number in itertools.count(1)
    )
    free = next(paths for paths in numbered if not any(path.exists() for path in paths))
    for name, path in zip(_FILES, free, strict=True):
        if (run_dir / name).exists():
            (run_dir / name).rename(path)
    text, facts, drawn, _ = free
    with suppress(OSError):
        text.write_text(text.read_text().replace(page.NAME, drawn.name).replace("failure.json", facts.name))


def _forget(run_dir: Path) -> None:
    *files, records = map(run_dir.joinpath, _FILES)
    shutil.rmtree(records, ignore_errors=True)
    for path in files:
        path.unlink(missing_ok=True)


def _json_path(run_dir: Path) -> Path:
    return run_dir / "failure.json"


def _to_json(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, indent=1, allow_nan=False)


def _note_user_code(ranks: Sequence[dict[str, Any]]) -> None:
    """In the stacks: which frames are the user's, and their lines. Who reads the file may have neither."""
    is_users = functools.cache(is_user_file)
    for rank in ranks:
        for owner in (rank, *rank.get("workers", ())):
            for frame in owner.get("stack", ()):
                if is_users(frame["file"]):
                    frame.update(user=True, source=Frame(**frame).source)


def _without_infinities(value: Any) -> Any:
    """JSON has no infinity: a limit that is none is null."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
