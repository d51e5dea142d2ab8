"""The watchdogs' notice board: a few keys of the ranks' store, seen through a connection of the watchdog's own.

Every call is one round trip (25-100 µs) and waits for nobody; it may still block for ever when the process that serves
the store is stopped, since torch has no time limit there. Traffic: a look a rank and poll, a beat a rank and a quarter
of the stall limit, and in an inquiry one testimony a rank, all of which only one rank, the judge, reads.
"""

from __future__ import annotations

import json
import time

from safetrain.comm import Comm
from safetrain.testimony import Testimony


class Board:
    """One run's keys; inquiries are numbered from 1."""

    def __init__(self, comm: Comm, run: int) -> None:
        self._store = comm.clone_store(f"watchdog/{run}")
        self._rank, self._world_size = comm.rank, comm.world_size

    # --- at all times -----------------------------------------------------------------------------------------------

    def beat(self, testimony: Testimony) -> None:
        """This rank's watchdog lives."""
        self._store.set(f"beat/{self._rank}", json.dumps([time.time(), testimony.to_json()]))

    def last_beat(self, rank: int) -> tuple[float, Testimony] | None:
        """How old a rank's last beat is, in seconds by the machines' clocks, and what it said."""
        if not self._store.check([f"beat/{rank}"]):
            return None
        when, text = json.loads(self._store.get(f"beat/{rank}"))
        return max(0.0, time.time() - when), Testimony.from_json(text)

    def leave(self) -> None:
        """This rank is no longer watched."""
        self._store.set(f"left/{self._rank}", "")

    def has_left(self, rank: int) -> bool:
        return bool(self._store.check([f"left/{rank}"]))

    # --- inquiries --------------------------------------------------------------------------------------------------

    def inquiry(self) -> int:
        """The number of the last one that was opened; 0: none was."""
        return int(self._store.add("inquiry", 0))

    def open(self, number: int) -> bool:
        """Open an inquiry. True on one rank, which is its judge."""
        if self._store.add(f"{number}/opened", 1) > 1:
            return False
        self._store.set("inquiry", str(number))  # not counted up: who opened one before may have died right here
        return True

    def testify(self, number: int, testimony: Testimony) -> None:
        self._store.set(f"{number}/testimony/{self._rank}", testimony.to_json())
        self._store.add(f"{number}/testimonies", 1)

    def count(self, number: int) -> int:
        """How many ranks have testified."""
        return int(self._store.add(f"{number}/testimonies", 0))

    def testimony(self, number: int, rank: int) -> Testimony | None:
        key = f"{number}/testimony/{rank}"
        return Testimony.from_json(self._store.get(key).decode()) if self._store.check([key]) else None

    def withdraw(self, number: int) -> None:
        """This rank has testified that it stands still, and moves again."""
        self._store.set(f"{number}/withdrawn", "")

    def withdrawn(self, number: int) -> bool:
        """Whether some rank has."""
        return bool(self._store.check([f"{number}/withdrawn"]))

    def answer(self, number: int, text: str) -> None:
        """The judge's answer; empty: carry on."""
        self._store.set(f"{number}/answer", text)

    def read_answer(self, number: int) -> str | None:
        """None: the judge has not answered yet."""
        key = f"{number}/answer"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def go(self, number: int) -> int:
        """This rank has read the verdict and goes; how many have."""
        return int(self._store.add(f"{number}/gone", 1))

    def gone(self, number: int) -> int:
        return int(self._store.add(f"{number}/gone", 0))
