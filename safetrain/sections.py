"""What ranks do one by one: sections of rank 0, and barriers with a name.

The others wait on the store, not in a collective: its time limit does not count, and nothing can be paired wrongly.
Whoever waits knows for what, so that it can say who did not come.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from safetrain.activity import ACTIVITY
from safetrain.call_site import place_here, place_of_error
from safetrain.collectives import CollectiveLog
from safetrain.errors import PeerFailed, RankFailed, RanksDiffer, together
from safetrain.words import ranks_in_words

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.25  # between two looks: a thousand ranks cost the store 4,000 a second
_GRACE_S = 10.0  # the others wait that much longer: rank 0's own watchdog knows the line and should speak first


class Meeting:
    """Where this rank meets the others outside of collectives; they all come to the same points in the same order."""

    def __init__(self, store: Store, rank: int, world_size: int, collectives: CollectiveLog, timeout_s: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._collectives, self._timeout_s = collectives, timeout_s
        self._sections = self._barriers = 0
        self._turns: Counter[str] = Counter()

    @contextmanager
    def rank_zero(self, name: str, limit_s: float) -> Iterator[bool]:
        """True on rank 0; the others' False, and at the end of the block they wait until rank 0 has left its own.

        Raises:
            RankFailed, PeerFailed: on rank 0, on the others, when the block raised on rank 0.
            RanksDiffer: rank 0 is in a section of another name.
            UsageError: the block issued a collective.
        """
        place = place_here()
        key, where = f"section/{self._sections}", f"rank_zero({name!r}) at {place}"
        self._sections += 1
        self._collectives.note_meeting(f"rank_zero({name!r})", place)
        if self._rank != 0:
            with self._collectives.refusing(where):
                yield False
            self._await_rank_zero(key, name, place, limit_s)
            return
        self._store.set(f"{key}/entered", json.dumps([name, place]))
        with ACTIVITY.within(f"rank_zero:{name}", limit_s), self._collectives.refusing(where):
            try:
                yield True
            except BaseException as error:
                reason = f"{type(error).__name__}: {error} at {place_of_error(error) or place}, in {where}"
                self._store.set(f"{key}/left", reason)
                if not isinstance(error, Exception):
                    raise
                text = f"rank 0 failed at step {ACTIVITY.step}: {reason}"
                raise together(RankFailed(text, step=ACTIVITY.step, phase=f"rank_zero({name!r})")) from error
        self._store.set(f"{key}/left", "")

    def _await_rank_zero(self, key: str, name: str, place: str, limit_s: float) -> None:
        step, here = ACTIVITY.step, f"rank {self._rank} waits for rank 0 in rank_zero({name!r}) at {place}"
        with ACTIVITY.within(f"rank_zero:{name}"):
            if not self._await(f"{key}/entered", self._timeout_s):
                raise PeerFailed(f"{here}, and it did not come in {self._timeout_s:g} s", ranks=[0], step=step)
        entered, its_place = json.loads(self._store.get(f"{key}/entered"))
        if entered != name:
            raise RanksDiffer(f"{here}, and that is in rank_zero({entered!r}) at {its_place}", step=step)
        with ACTIVITY.within(f"rank_zero:{name}", limit_s + _GRACE_S):
            if not self._await(f"{key}/left", limit_s + _GRACE_S):
                text = f"{here}, and it takes longer than limit_s={limit_s:g}: raise that if it may"
                raise PeerFailed(text, ranks=[0], step=step)
        if reason := self._store.get(f"{key}/left").decode():
            raise together(PeerFailed(f"rank 0 failed at step {step}: {reason}", ranks=[0], step=step))

    def barrier(self, name: str, limit_s: float | None = None) -> None:
        """Return when every rank has come to the barrier of this ``name``.

        Raises:
            RanksDiffer: on all ranks, when some came to another one.
            PeerFailed: some did not come within ``limit_s`` (default: the time limit of collectives).
        """
        place, key, step = place_here(), f"barrier/{self._barriers}", ACTIVITY.step
        self._collectives.refuse_in_section(f"barrier({name!r})")
        self._barriers += 1
        ranks = range(self._world_size)
        self._store.set(f"{key}/{self._rank}", json.dumps([name, place]))
        if self._store.add(f"{key}/arrived", 1) == self._world_size:
            said = [json.loads(text) for text in self._store.multi_get([f"{key}/{rank}" for rank in ranks])]
            self._store.set(f"{key}/open", _difference(said))
        limit_s = self._timeout_s if limit_s is None else limit_s
        with ACTIVITY.within(f"barrier:{name}", None if limit_s == self._timeout_s else limit_s + _GRACE_S):
            came = self._await(f"{key}/open", limit_s)
        if not came:
            missing = [rank for rank in ranks if not self._store.check([f"{key}/{rank}"])]
            text = f"{ranks_in_words(missing)} did not come to barrier({name!r}) at {place} within {limit_s:g} s"
            raise PeerFailed(text, ranks=missing, step=step)
        if difference := self._store.get(f"{key}/open").decode():
            raise RanksDiffer(difference, step=step)

    def turn(self, name: str, whose: int) -> Callable[[], None]:
        """Wait until rank ``whose`` has had its turn, for as long as it likes. There it does not wait, and returns what
        ends the turn."""
        self._turns[name] += 1
        key = f"turn/{name}/{self._turns[name]}"
        if self._rank == whose:
            return lambda: self._store.set(key, "")
        with ACTIVITY.within(name):
            self._await(key, math.inf)
        return lambda: None

    def checked_new_group(self, new_group: Callable[..., dist.ProcessGroup]) -> Callable[..., dist.ProcessGroup]:
        """``new_group``, which asks all ranks first whether they make the same group: otherwise it never returns."""

        def checked(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
            if not kwargs.get("use_local_synchronization") and self._world_size > 1:
                # groups of one rank need nobody: there each rank may make its own
                who = "all ranks" if ranks is None else "one rank" if len(ranks) == 1 else sorted(ranks)
                self.barrier(f"new_group({who})")
            if not args:
                kwargs.setdefault("timeout", timedelta(seconds=self._timeout_s))  # torch's own default is 30 minutes
            return new_group(ranks, *args, **kwargs)

        return checked

    def _await(self, key: str, limit_s: float) -> bool:
        """Whether some rank set ``key`` within ``limit_s``.

        Looks now and then: a wait in torch's store does not hear Ctrl-C, and one that runs out prints warnings.
        """
        deadline, pause_s = time.monotonic() + limit_s, _SHORTEST_PAUSE_S
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return True


def _difference(said: Sequence[tuple[str, str]]) -> str:
    """Who came to which barrier; empty where all came to the same."""
    sides: dict[str, list[int]] = {}
    for rank, (name, _) in enumerate(said):
        sides.setdefault(name, []).append(rank)
    if len(sides) == 1:
        return ""
    lines = [f"  {ranks_in_words(ranks)}: barrier({name!r}) at {said[ranks[0]][1]}" for name, ranks in sides.items()]
    remedy = "A name must come from what all ranks share, and every rank must pass the same barriers in the same order."
    return "\n".join(["the ranks came to different barriers:", *lines, remedy])
