"""The watchdogs' notice board: a few keys of the ranks' store, seen through a connection of the watchdog's own.

Every call is one round trip (25-100 µs) and waits for nobody; it may still block for ever when the process that serves
the store is stopped, since torch has no time limit there. Traffic: a look a rank and poll, a beat a rank and a quarter
of the stall limit, and in an inquiry one testimony a rank, all of which only one rank, the judge, reads.
"""

from __future__ import annotations

import json
import time
from typing import Protocol

from safetrain.testimony import Testimony


class Store(Protocol):
    """What of torch's store is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


class MemoryStore:
    """A store for a process that is alone."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        number = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(number).encode()
        return number


class Board:
    """One run's keys; inquiries are numbered from 1. ``store`` is a connection that no other thread uses."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank

    # --- at all times -----------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """A rank has failed, and its verdict is told: all are to go."""
        self._store.set("failed", "")

    def failed(self) -> bool:
        return bool(self._store.check(["failed"]))

    def first_to_say(self, what: str) -> bool:
        """True for one rank, and once."""
        return self._store.add(f"said/{what}", 1) == 1

    def beat(self, testimony: Testimony) -> None:
        """This rank's watchdog lives."""
        self._store.set(f"beat/{self._rank}", json.dumps([time.time(), testimony.to_json()]))

    def last_beat(self, rank: int) -> tuple[float, Testimony] | None:
        """How old a rank's last beat is, in seconds by the machines' clocks, and what it said."""
        if not self._store.check([f"beat/{rank}"]):
            return None
        when, text = json.loads(self._store.get(f"beat/{rank}"))
        return max(0.0, time.time() - when), Testimony.from_json(text)

    def leave(self, how: str) -> None:
        """This rank is no longer watched; ``how`` goes after its name in a sentence. Empty: it takes part again."""
        self._store.set(f"left/{self._rank}", how)

    def left(self, rank: int) -> str:
        """How a rank has left; empty where it has not."""
        key = f"left/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

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
