"""What the watchdog watches (see watchdog.py): safetrain's own loop; a script's is in guarded.py."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from safetrain.activity import ACTIVITY
from safetrain.board import Board
from safetrain.comm import Comm
from safetrain.config import Watchdog as WatchdogOptions
from safetrain.patience import Patience
from safetrain.stalled import judge
from safetrain.testimony import Testimony
from safetrain.verdict import Verdict
from safetrain.whereabouts import note_whereabouts


class RankZeroIsDone(Exception):
    """The script has ended well on rank 0, which served what all ranks share: there is nobody to ask any more."""


class Watched(Protocol):
    """What is watched: the loop of this process, or a script that knows nothing of it.

    Attributes:
        thread: the one whose stack tells where this rank is.
        left: how it has left the others, when it is no longer watched, in words.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def thread(self) -> int: ...
    @property
    def left(self) -> str: ...

    def board(self) -> Board:
        """A new connection to what all ranks share."""

    def patience(self) -> Patience:
        """A new look at this process."""

    def count(self) -> int:
        """Grows with each progress."""

    def look(self, patience: Patience, board: Board) -> None:
        """Called at every look, before anything is judged by it."""

    def testify(self, patience: Patience) -> Testimony: ...

    def judge(self, heard: Sequence[Testimony]) -> Verdict | None:
        """Pure: what all ranks say, by rank."""

    def carries_on(self, heard: Sequence[Testimony], board: Board) -> None:
        """Nobody was condemned: this rank, the judge, may say something of it."""


class Loop:
    """safetrain's own loop, which says itself what it does."""

    left = "left fit()"

    def __init__(self, comm: Comm, options: WatchdogOptions, run: int) -> None:
        self._comm, self._options, self._run = comm, options, run
        self.rank, self.world_size, self.local_rank = comm.rank, comm.world_size, comm.local_rank
        self.thread = threading.get_ident()

    def board(self) -> Board:
        return Board(self._comm.clone_store(f"watchdog/{self._run}"), self.rank)

    def patience(self) -> Patience:
        return Patience(self._options, ACTIVITY)

    def count(self) -> int:
        return ACTIVITY.count

    def look(self, _patience: Patience, _board: Board) -> None:
        note_whereabouts(self.local_rank)

    def testify(self, patience: Patience) -> Testimony:
        calls = self._comm.collectives.recent() or [str(call) for call in self._comm.collectives.voted()]
        return Testimony.full(self.rank, patience, self.thread, calls)

    def judge(self, heard: Sequence[Testimony]) -> Verdict | None:
        return judge(heard)

    def carries_on(self, _heard: Sequence[Testimony], _board: Board) -> None:
        pass
