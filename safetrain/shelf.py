"""The folder that holds a run's checkpoints: how one gets there whole, which is the newest, which are kept.

A checkpoint is written in a folder of another name and renamed when everything is on the disk. No name is used twice
while it is taken, so nothing is ever overwritten: a process may be killed at any instant.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetrain.durable import link, sync
from safetrain.errors import CheckpointError
from safetrain.manifest import Manifest

logger = logging.getLogger("safetrain")

_NAME = re.compile(r"step_\d+(_\d+)?")
_DRAFT, _DISCARDED = ".writing_", ".removing_"


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the ``last`` ones (None: all), and the ``best`` by their metric."""

    last: int | None = None
    best: int = 0
    mode: Literal["max", "min"] = "max"

    def choose(self, manifests: Sequence[Manifest]) -> set[int]:
        """The serial numbers of those that stay. Of two of the same step, only the later one does."""
        candidates = _latest_of_each_step(manifests)
        kept = candidates if self.last is None else candidates[-self.last :]
        return {each.serial for each in (*kept, *self.rank(candidates)[: self.best])}

    def rank(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Best first; of equal ones the earlier. Those without a metric are none."""
        sign = 1 if self.mode == "min" else -1
        candidates = _latest_of_each_step(manifests)
        known = [(sign * each.metric, each.serial, each) for each in candidates if each.metric is not None]
        return [each for _, _, each in sorted(known, key=lambda entry: entry[:2])]


def _latest_of_each_step(manifests: Sequence[Manifest]) -> list[Manifest]:
    in_order = sorted(manifests, key=lambda each: each.serial)
    return sorted({each.step: each for each in in_order}.values(), key=lambda each: each.serial)


class Shelf:
    """One writer at a time; readers at any time."""

    def __init__(self, folder: Path, keep: Keep | None = None) -> None:
        self.folder, self._keep = folder, keep or Keep()

    def begin(self, step: int) -> Path:
        """A fresh folder to write in. What a writer that was killed has left is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*_step_*"):
            if left.name.startswith((_DRAFT, _DISCARDED)):
                self.discard(left)
        draft = self.folder / f"{_DRAFT}step_{step}_{secrets.token_hex(4)}"
        draft.mkdir()
        return draft

    def next_serial(self) -> int:
        return 1 + max((manifest.serial for _, manifest in self.readable()), default=0)

    def commit(self, draft: Path, manifest: Manifest) -> Path:
        """Make a draft, whose files are all on the disk, the newest checkpoint; returns its place."""
        manifest.write(draft)
        sync(draft)
        target = self._free_name(manifest.step)
        draft.rename(target)
        sync(self.folder)
        try:
            link(self.folder / "latest", target.name)
            self._tidy()
        except OSError as error:  # it is saved; another machine may hold a file of an old one open
            logger.warning("%s is saved, but around it not all could be put in order: %s", target.name, error)
        return target

    def discard(self, draft: Path) -> None:
        """Remove what can't become a checkpoint; what can't be removed now is when the next one begins."""
        shutil.rmtree(draft, ignore_errors=True)

    def readable(self) -> list[tuple[Path, Manifest]]:
        """Checkpoints whose manifest is in order, newest first; their files were not looked at."""
        found = []
        for path in self._paths():
            try:
                found.append((path, Manifest.read(path)))
            except CheckpointError as error:
                logger.debug("passed over: %s", error)
        return sorted(found, key=lambda entry: entry[1].serial, reverse=True)

    def newest_good(self) -> tuple[Path, Manifest] | None:
        """The newest one of which every byte is as it was written; None where there is none at all. Of those that are
        not, it warns.

        Raises:
            CheckpointError: there are some, and none is good.
        """
        problems = []
        readable = self.readable()
        for path in sorted(set(self._paths()) - {path for path, _ in readable}):
            try:
                Manifest.read(path)
            except CheckpointError as error:
                problems.append(str(error))
        for path, manifest in readable:
            try:
                manifest.verify(path)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                logger.warning("%s; %s is used instead", problem, path.name)
            return path, manifest
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(f"no checkpoint in {self.folder} can be used:\n{listed}")
        return None

    def _paths(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())

    def _free_name(self, step: int) -> Path:
        target, times = self.folder / f"step_{step}", 1
        while target.exists():
            times += 1
            target = self.folder / f"step_{step}_{times}"
        return target

    def _tidy(self) -> None:
        found = self.readable()
        manifests = [manifest for _, manifest in found]
        if self._keep.best and (ranked := self._keep.rank(manifests)):
            link(self.folder / "best", next(path.name for path, manifest in found if manifest is ranked[0]))
        kept = self._keep.choose(manifests)
        for path, manifest in found:
            if manifest.serial not in kept:
                # half removed, it must not be taken for a checkpoint
                self.discard(path.rename(self.folder / f"{_DISCARDED}{path.name}"))
