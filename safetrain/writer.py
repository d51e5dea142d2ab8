"""The thread that writes checkpoints beside training, and how those of all ranks meet: on the store, in no collective.

Rank 0's leads: it makes the folder and says which, hears from each rank how its own files fared and what is in them,
writes what all ranks share, commits, and tells all how it ended. So every rank counts the same successes and failures.
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from safetrain import __version__, archive
from safetrain.durable import sync
from safetrain.errors import CheckpointError
from safetrain.manifest import Manifest, Seal
from safetrain.pieces import Piece
from safetrain.rank_log import LOG_ONLY
from safetrain.shelf import Shelf

logger, log_only = logging.getLogger("safetrain"), logging.getLogger(LOG_ONLY)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # between two looks at the store
_FAREWELL_S = 2.0  # rank 0's longest wait for another one that has yet to hear how the last save ended
_GRACE_S = 10.0  # rank 0 gives up first, and says why


class KeyValueStore(Protocol):
    """What of torch's store is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True)
class Job:
    """One rank's part of one checkpoint; nothing in it may change any more.

    Attributes:
        structure, pieces: what all ranks share (see tree.split). Rank 0 writes the structure; of tensors that lie on
            several ranks each writes its piece.
        last: the ranks leave after it, and none may be gone before all know how it ended.
        unable: why this rank has no part to write; empty if it has.
    """

    step: int
    epoch: int
    metric: float | None
    config_text: str
    structure: Any
    pieces: Mapping[str, Piece]
    own: Mapping[str, Any]
    last: bool = False
    unable: str = ""


class Limit(NamedTuple):
    """How long a save may take, by which key of the config."""

    key: str
    seconds: float

    def __str__(self) -> str:
        return f"checkpoint.{self.key}={self.seconds:g}"


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on all ranks: ``path`` of the checkpoint, or ``error``."""

    step: int
    path: str = ""
    error: str = ""


class Writer:
    """One rank's. All ranks start the same jobs in the same order, one at a time."""

    def __init__(self, shelf: Shelf, store: KeyValueStore, rank: int, world_size: int, timeout_s: float) -> None:
        self._shelf, self._store, self._limit = shelf, store, Limit("timeout_s", timeout_s)
        self._rank, self._world_size = rank, world_size
        self._number = 0
        self._outcome: Outcome | None = None
        self._thread: threading.Thread | None = None

    def start(self, job: Job, limit: Limit | None = None) -> None:
        """Begin to write; the one before has been waited for."""
        self._number += 1
        self._limit = limit or self._limit
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(job,), name="safetrain-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> Outcome | None:
        """How the last job ended, once; None where there was none, or it has not ended within ``limit_s``."""
        if self._thread is None:
            return None
        self._thread.join(limit_s)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._outcome

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self, job: Job) -> None:
        deadline = time.monotonic() + self._limit.seconds
        try:
            self._outcome = self._lead(job, deadline) if self._rank == 0 else self._follow(job, deadline + _GRACE_S)
        except Exception as error:  # noqa: BLE001  a thread has no caller: the loop takes it up at the next save
            self._outcome = Outcome(job.step, error=self._in_words(error))

    def _lead(self, job: Job, deadline: float) -> Outcome:
        draft = None
        began = time.monotonic()
        try:
            if job.unable:
                raise CheckpointError(job.unable)
            draft = self._shelf.begin(job.step)
            self._say("draft", {"name": draft.name})
            seals, index = self._write_mine(draft, job)
            indexes = [index]
            for rank in range(1, self._world_size):
                heard = self._hear(f"rank_{rank}", deadline, f"rank {rank} has not written its part in time")
                seals |= {name: Seal(**seal) for name, seal in heard["seals"].items()}
                indexes.append(heard["index"])
            seals |= _sealed(archive.write_shared(draft, job.structure, indexes))
            if time.monotonic() > deadline:  # the others will have given up by the time it is there
                raise CheckpointError(f"it has not been written within {self._limit}")
            self._forget()
            path = self._shelf.commit(draft, self._manifest(job, seals))
            outcome = Outcome(job.step, path=str(path))
            log_only.info("checkpoint of step %d written in %.1f s: %s", job.step, time.monotonic() - began, path)
        except Exception as error:  # noqa: BLE001  whatever it is, all ranks must hear of it
            outcome = Outcome(job.step, error=self._in_words(error))
            if draft is None:
                self._say("draft", {"error": outcome.error})
            else:
                self._shelf.discard(draft)
            logger.warning("%s; earlier checkpoints are as they were", outcome.error)
        self._say("done", {"path": outcome.path, "error": outcome.error})
        if job.last:
            with suppress(CheckpointError):
                for rank in range(1, self._world_size):
                    self._await(f"heard_{rank}", time.monotonic() + _FAREWELL_S, "")
        return outcome

    def _follow(self, job: Job, deadline: float) -> Outcome:
        try:
            draft = self._shelf.folder / self._hear("draft", deadline, "rank 0 has not begun in time")["name"]
            try:
                if job.unable:
                    raise CheckpointError(job.unable)
                seals, index = self._write_mine(draft, job)
                facts = {"seals": {name: asdict(seal) for name, seal in seals.items()}, "index": index}
                self._say(f"rank_{self._rank}", facts)
            except Exception as error:  # noqa: BLE001  whatever it is, rank 0 waits for it
                self._say(f"rank_{self._rank}", {"error": self._in_words(error, draft)})
            return Outcome(job.step, **self._await("done", deadline, "rank 0 has not finished in time"))
        finally:
            if job.last:
                self._say(f"heard_{self._rank}", {})

    def _write_mine(self, draft: Path, job: Job) -> tuple[dict[str, Seal], str]:
        """This rank's files, sealed and on the disk; and what is where in them."""
        files, index = archive.write_pieces(draft, self._rank, job.pieces)
        return _sealed([*files, archive.write_own(draft, self._rank, job.own)]), index

    def _manifest(self, job: Job, seals: dict[str, Seal]) -> Manifest:
        return Manifest(
            serial=self._shelf.next_serial(),
            step=job.step,
            epoch=job.epoch,
            world_size=self._world_size,
            metric=job.metric,
            config_text=job.config_text,
            files=seals,
            versions={"safetrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        )

    # --- on the store -----------------------------------------------------------------------------------------------

    def _say(self, topic: str, facts: Mapping[str, Any]) -> None:
        self._store.set(f"{self._number}/{topic}", json.dumps(facts))

    def _hear(self, topic: str, deadline: float, otherwise: str) -> dict[str, Any]:
        """
        Raises:
            CheckpointError: what was said is an error, or nothing was: ``otherwise``.
        """
        facts = self._await(topic, deadline, otherwise)
        if "error" in facts:
            raise CheckpointError(facts["error"])
        return facts

    def _await(self, topic: str, deadline: float, otherwise: str) -> dict[str, Any]:
        """What was said. Looks now and then: a wait in torch's store that runs out prints warnings."""
        key, pause_s = f"{self._number}/{topic}", _SHORTEST_PAUSE_S
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                raise CheckpointError(f"{otherwise} ({self._limit})")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        facts: dict[str, Any] = json.loads(self._store.get(key))
        return facts

    def _forget(self) -> None:
        """Delete what nobody will read any more: all ranks were heard, so they are past the save before this one."""
        for rank in range(1, self._world_size):
            self._store.delete_key(f"{self._number}/rank_{rank}")
        for topic in ("draft", "done"):
            self._store.delete_key(f"{self._number - 1}/{topic}")

    def _in_words(self, error: Exception, draft: Path | None = None) -> str:
        if isinstance(error, CheckpointError):
            return str(error)
        text = f"rank {self._rank} on {socket.gethostname()} can't write a checkpoint: {type(error).__name__}: {error}"
        if draft is not None and not draft.exists():
            text += f". It does not see {draft.parent}: checkpoints need a folder that all machines share"
        return text


def _sealed(files: Sequence[Path]) -> dict[str, Seal]:
    seals = {file.name: Seal.of(file) for file in files}
    for file in files:
        sync(file)
    return seals
