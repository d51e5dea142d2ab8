"""Where each rank of this machine is, as its launcher sees it: also of a rank that was killed, or does not answer.

The launcher has a file in memory with a line for each rank, which the rank's watchdog rewrites at every look. It needs
no disk and no answer, and outlives the rank. Under another launcher there is none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from safetrain import stacks
from safetrain.activity import ACTIVITY

_VARIABLE = "SAFETRAIN_WHEREABOUTS"
_LINE_BYTES = 160
_SHOWN_FRAMES = 15
_STATES = {"T": ", stopped", "t": ", stopped by a debugger", "D": ", waiting for a disk or a device", "Z": ", ended"}

_own_file: int | None = None


@dataclass(frozen=True)
class Whereabouts:
    """The launcher's file."""

    file: int

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[Self]:
        """For as long as ranks may run."""
        file = os.memfd_create("safetrain-whereabouts") if sys.platform == "linux" else os.open(os.devnull, os.O_RDWR)
        try:
            yield cls(file)
        finally:
            os.close(file)

    @property
    def environment(self) -> dict[str, str]:
        """What a rank needs to find the file."""
        return {_VARIABLE: f"/proc/{os.getpid()}/fd/{self.file}"}

    def of(self, local_rank: int) -> str:
        """``in training_step at step 5, for 0.2 s``; empty where the rank has not said yet."""
        line = os.pread(self.file, _LINE_BYTES, local_rank * _LINE_BYTES).strip(b"\0 ")
        if not line:
            return ""
        try:
            facts = json.loads(line)
        except ValueError:  # half written
            return ""
        return f"in {facts['phase']} at step {facts['step']}, for {time.monotonic() - facts['since']:.1f} s"

    def last_seen(self, local_rank: int) -> str:
        """``in training_step at step 5``, of a rank that is gone."""
        return self.of(local_rank).partition(", for")[0]

    def tell(self, pids: Iterable[int], first_rank: int = 0) -> str:
        """All ranks' places and stacks, in words; asks them without stopping anything."""
        lines = []
        for local_rank, pid in enumerate(pids):
            state = _STATES.get(stacks.state_of(pid), "")
            rank = first_rank + local_rank
            lines.append(f"rank {rank} (process {pid}{state}): {self.of(local_rank) or 'starting'}")
            frames = stacks.ask(pid)[-_SHOWN_FRAMES:]
            lines += [f"    {frame}" for frame in frames] or ["    does not answer; try `py-spy dump --pid ...`"]
        return "\n".join(lines) + "\n"


def note_whereabouts(local_rank: int) -> None:
    """Write this rank's line; costs 5 µs."""
    global _own_file
    if _own_file is None:
        _own_file = -1
        with suppress(KeyError, OSError):
            _own_file = os.open(os.environ[_VARIABLE], os.O_WRONLY)
    if _own_file >= 0:
        facts = {"step": ACTIVITY.step, "phase": ACTIVITY.phase[:60], "since": round(ACTIVITY.since, 3)}
        os.pwrite(_own_file, json.dumps(facts).encode().ljust(_LINE_BYTES)[:_LINE_BYTES], local_rank * _LINE_BYTES)
