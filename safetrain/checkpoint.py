"""Checkpoints: a run's state, written whole or not at all, and read back as what was written or not at all.

``save`` holds the loop for a copy in memory; a thread (writer.py) does the rest. Which file holds what is told in
archive.py, how a checkpoint gets its name and which are kept in shelf.py.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from safetrain import archive, tree
from safetrain.activity import ACTIVITY
from safetrain.comm import Comm
from safetrain.config import Checkpoint
from safetrain.errors import CheckpointError
from safetrain.manifest import NAME, Manifest
from safetrain.peers import gone_ranks
from safetrain.shelf import Keep, Shelf
from safetrain.snapshot import Snapshot
from safetrain.staging import Staging
from safetrain.words import ranks_in_words
from safetrain.writer import Job, Limit, Outcome, Writer

logger = logging.getLogger("safetrain")

_PATIENCE_S = 5.0  # a wait that is longer is told
_LOOK_S = 0.25  # after a failure: between two looks whether a rank is gone
_LAST_WORD_S = 2.5  # for a writer that has all it waits for: a little more than its farewell
_GRACE_S = 30.0  # the writers keep to timeout_s by themselves, unless the disk holds them


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds; all tensors are on the CPU, but for what ``filled`` puts elsewhere.

    Attributes:
        world_size: of the run that saved.
        own: what was each rank's alone, by rank of that run.
    """

    path: Path
    step: int
    epoch: int
    world_size: int
    shared: dict[str, Any]
    own: tuple[dict[str, Any], ...]
    config_text: str

    def filled(self, place: Callable[[str, torch.Tensor], torch.Tensor]) -> Saved:
        """With what was left empty in it; ``place``: where to, see ``tree.join``.

        Raises:
            CheckpointError: it can't be read.
        """
        return replace(self, shared=archive.fill(self.path, self.shared, place))


class Checkpoints:
    """A run's checkpoints in ``folder`` (rank 0's counts). Every rank makes one, and calls the same methods."""

    def __init__(self, folder: Path, comm: Comm, options: Checkpoint) -> None:
        chosen, token = comm.broadcast((str(folder), secrets.token_hex(8)))
        self._comm, self._options = comm, options
        keep = Keep(options.keep_last, options.keep_best, options.mode)
        self._shelf = Shelf(Path(chosen), keep)
        store = comm.clone_store(f"checkpoints/{token}")
        self._writer = Writer(self._shelf, store, comm.rank, comm.world_size, options.timeout_s)
        self._staging = Staging()
        self._step = 0  # of the save under way
        self._newest: tuple[int, str] | None = None  # step and path
        self._failures = 0

    def save(self, snapshot: Snapshot, *, metric: float | None = None, wait: bool = False) -> None:
        """Save ``snapshot``: every rank's, of the same step. What is in it may change again on return.

        Holds the caller for a copy in memory, or with ``wait`` until it is written; and first until the one before is.

        Raises:
            CheckpointError: a save failed, now or before, and the options say to stop.
            UsageError: the state holds something that could not be read back.
        """
        self.finish()
        waits = wait or not self._options.asynchronous
        with ACTIVITY.within("save_checkpoint"):
            job = self._job(snapshot, metric, copies=not waits)
        self._step = snapshot.step
        self._writer.start(job)
        if waits:
            self.finish()

    def save_at_failure(self, step: int, take: Callable[[], Snapshot]) -> str:
        """Save the state that ranks which failed together are left with, and say where it is; all ranks call it.

        Nothing that goes wrong on one rank, ``take`` included, lets the others wait for more than they must.

        Raises:
            CheckpointError: why it is not saved.
        """
        limit = Limit("at_failure_s", self._options.at_failure_s)
        deadline = time.monotonic() + limit.seconds
        with ACTIVITY.within("save_checkpoint", limit.seconds + 2 * _GRACE_S):
            if (before := self._await_peers(deadline)) is not None and not before.error:
                self._newest = (before.step, before.path)
            if self._newest is not None and self._newest[0] == step:
                return self._newest[1]
            try:
                job = replace(self._job(take(), None, copies=False), last=True)
            except Exception as error:  # noqa: BLE001  user code takes part; whatever it is, the others wait for this rank
                unable = f"rank {self._comm.rank} can't say what its state is: {type(error).__name__}: {error}"
                job = Job(step, 0, None, "", None, {}, {}, last=True, unable=unable)
            self._writer.start(job, limit)
            outcome = self._await_peers(deadline + _GRACE_S)
        assert outcome is not None
        if outcome.error:
            raise CheckpointError(outcome.error)
        return outcome.path

    def _await_peers(self, deadline: float) -> Outcome | None:
        """How the save under way ends, if one is; not longer than all ranks of this machine live."""
        if not self._writer.busy:
            return self._writer.wait(0)
        while (outcome := self._writer.wait(_LOOK_S)) is None:
            if gone := gone_ranks(at_once=True):
                if (outcome := self._writer.wait(_LAST_WORD_S)) is not None:
                    return outcome  # it had heard how the save ended, and left
                raise CheckpointError(f"{ranks_in_words([one.rank for one in gone])} ended before it was written")
            if time.monotonic() > deadline:
                raise CheckpointError(f"the disk under {self._shelf.folder} does not answer")
        return outcome

    def finish(self) -> None:
        """Return when what was saved is written.

        Raises:
            CheckpointError: it is not, and the options say to stop.
        """
        outcome = self._await_writer()
        if outcome is None:
            return
        if not outcome.error:
            self._failures, self._newest = 0, (outcome.step, outcome.path)
            return
        self._failures += 1
        text = f"step {outcome.step} was not saved: {outcome.error}"
        if self._options.on_error == "stop":
            raise CheckpointError(f"{text}. To train on without, set checkpoint.on_error=warn.")
        if self._failures > (limit := self._options.max_failures):
            raise CheckpointError(
                f"{text}. That was failure {self._failures} in a row, and checkpoint.max_failures={limit}."
            )

    def load(self, where: str | Path, leave: Sequence[str] = ()) -> Saved | None:
        """The same checkpoint on every rank, each byte of it verified. Tensors whose names begin with one of ``leave``
        are left empty (see ``Saved.filled``).

        ``where`` is ``auto``, for the newest good one of this run (None where there is none at all); or a path: of a
        checkpoint, for that one; of a run or its checkpoints, for the newest good one in there.

        Raises:
            CheckpointError: on all ranks: it is not there or not good; or there are some, and none is good.
        """
        comm, limit_s = self._comm, self._options.timeout_s
        choice: tuple[Path, Manifest] | CheckpointError | None = None
        with comm.rank_zero("load_checkpoint", limit_s) as mine:
            if mine:
                try:
                    choice = self._shelf.newest_good() if where == "auto" else find(Path(where))
                except CheckpointError as error:
                    choice = error
        choice = comm.broadcast(choice)
        if isinstance(choice, CheckpointError):
            raise choice
        if choice is None:
            return None
        if where == "auto":
            self._newest = (choice[1].step, str(choice[0]))
        with ACTIVITY.within("load_checkpoint", limit_s):
            problem = ""
            try:
                saved = read(*choice, leave)
            except CheckpointError as error:
                problem = f"rank {comm.rank}: {error}"
            if problems := list(filter(None, comm.gather(problem))):
                raise CheckpointError("\n".join(problems))
        return saved

    def _job(self, snapshot: Snapshot, metric: float | None, *, copies: bool) -> Job:
        structure, pieces = tree.split(snapshot.shared)  # on all ranks: they look whether it can be written
        mine = {name: piece for name, piece in pieces.items() if piece.written_by(self._comm.rank)}
        if copies:
            staged = self._staging.copy({name: piece.local for name, piece in mine.items()})
            mine = {name: replace(piece, local=staged[name]) for name, piece in mine.items()}
        return Job(
            step=snapshot.step,
            epoch=snapshot.epoch,
            metric=None if metric is None or not math.isfinite(metric) else metric,
            config_text=snapshot.config_text,
            structure=structure,
            pieces=mine,
            own=tree.rebuild(snapshot.own, lambda _, tensor: tensor.cpu().clone()),
        )

    def _await_writer(self) -> Outcome | None:
        if not self._writer.busy:
            return self._writer.wait(0)
        begin, told = time.monotonic(), False
        limit_s = self._options.timeout_s + _GRACE_S
        with ACTIVITY.within("save_checkpoint", limit_s + _GRACE_S):
            while (outcome := self._writer.wait(_PATIENCE_S)) is None:
                waited_s = time.monotonic() - begin
                if waited_s > limit_s:
                    raise CheckpointError(
                        f"the checkpoint of step {self._step} has not been written in {waited_s:.0f} s: does the disk "
                        f"under {self._shelf.folder} answer?"
                    )
                if not told:
                    logger.warning("waiting until the checkpoint of step %d is written, by rank 0", self._step)
                    told = True
        return outcome


def find(path: Path) -> tuple[Path, Manifest]:
    """The checkpoint at ``path``, or the newest good one of the run there; verified.

    Raises:
        CheckpointError: there is none, or it is not good.
    """
    if not path.exists():
        raise CheckpointError(f"{path} is not there")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a checkpoint of safetrain is a folder with a {NAME}")
    if not (path / NAME).exists():
        for folder in (path / "checkpoints", path):
            if found := Shelf(folder).newest_good():
                return found
    path = path.resolve()  # what `latest` points to now, it may not tomorrow
    manifest = Manifest.read(path)
    manifest.verify(path)
    return path, manifest


def read(path: Path, manifest: Manifest, leave: Sequence[str] = ()) -> Saved:
    """What ``find`` found; tensors whose names begin with one of ``leave`` are left empty.

    Raises:
        CheckpointError: it can't be read.
    """
    left = tuple(leave)
    return Saved(
        path=path,
        step=manifest.step,
        epoch=manifest.epoch,
        world_size=manifest.world_size,
        shared=archive.read_shared(path, lambda at, empty: empty if at.startswith(left) else tree.on_cpu(at, empty)),
        own=tuple(archive.read_own(path, rank) for rank in range(manifest.world_size)),
        config_text=manifest.config_text,
    )
