"""Idea 5, watch: a thread beside the loop, outside all collectives, that does not let a job stand still without a word.

A rank without progress for longer than its phase may take opens an inquiry on the board. Every rank's watchdog then
says at once where its rank is; one of them, the judge, waits a moment for all, takes silence for evidence, and answers:
carry on, or the verdict (stalled.py). On a verdict all ranks leave by ``os._exit``: nothing else ends a wait in Gloo.

A second thread watches the first one: torch's store knows no time limits, and any thread can die.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from safetrain import machine
from safetrain.comm import Comm
from safetrain.config import Watchdog as WatchdogOptions
from safetrain.departure import be_the_one_who_leaves, leave_now, print_verdict, tell
from safetrain.retelling import retold, spread
from safetrain.stacks import ENDED, answer_signals, state_of
from safetrain.stalled import judge_alone
from safetrain.testimony import Testimony
from safetrain.watched import Loop, RankZeroIsDone, Watched

logger = logging.getLogger("safetrain")

_HEARING_S = 2.0  # the judge's longest wait for a testimony, and
_SILENCE_S = 0.5  # its wait for one of a rank whose last beat is older than its limit
_ANSWER_S = 6.0  # after that, the judge itself is gone
_FAREWELL_S = 1.0  # the judge waits so long for the others to read its verdict
_SECOND_THOUGHTS_S = 0.1  # between the verdict and the sentence: has anybody moved?
_LOOK_S = 0.02
_LONGEST_BEAT_S = 5.0
_LOOKS_PER_S = 2000  # of all ranks together, at the one process that serves the store: it answers 20 times as many
_GUARD_STOPS_S = 2.0  # it waits for nobody
_GUARD_S = 5.0  # a watchdog thread that has not looked for so long is stuck, or gone

_live: Watch | None = None
_runs = 0


@contextmanager
def watch(comm: Comm, options: WatchdogOptions, run_dir: Path | None, *, tells: bool = True) -> Iterator[None]:
    """Watch this process' calling thread until the block ends. Every rank does so; in another such block, nothing more.

    ``tells``: nobody else will print the verdict.
    """
    global _live, _runs
    if not options.enabled or _live is not None:
        yield
        return
    _runs += 1
    _live = Watch(Loop(comm, options, _runs), options, run_dir, tells=tells)
    try:
        yield
    finally:
        _live.stop()
        _live = None


class Watch:
    """Two threads beside what is ``watched``, from now on until ``stop``."""

    def __init__(self, watched: Watched, options: WatchdogOptions, run_dir: Path | None, *, tells: bool) -> None:
        answer_signals()
        options = replace(options, poll_s=max(options.poll_s, watched.world_size / _LOOKS_PER_S))
        self._watched, self._options, self._run_dir, self._tells = watched, options, run_dir, tells
        self._rank, self._world_size = watched.rank, watched.world_size
        self._patience, self._board = watched.patience(), watched.board()
        self._seen = 0  # the last inquiry that this rank has taken part in
        self._ask_again_at = self._beat_at = 0.0
        self._beat_every_s = min(_LONGEST_BEAT_S, max(options.poll_s, options.stall_s / 4))
        self._looked_at = time.monotonic()
        self._board.beat(self._here())  # a rank that stops before its first look is to be known
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"safetrain-{target.__name__.strip('_')}", daemon=True)
            for target in (self._watch, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No longer watch; where a verdict is under way, the process ends in here."""
        self._stopped.set()
        # A thread that outlived this could hold the last reference to a process group; to let go of it while Python
        # ends is SIGABRT, since torch's destructor waits for the interpreter's lock (seen: 1 of 10 runs under load).
        for thread, limit_s in zip(self._threads, (_ANSWER_S + _FAREWELL_S, _GUARD_STOPS_S), strict=True):
            thread.join(limit_s)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(self._options.poll_s):
                self._watched.look(self._patience, self._board)
                self._patience.look(time.monotonic())
                self._look()
            self._board.leave(self._watched.left)
        except RankZeroIsDone:
            return  # the guard goes on alone
        except Exception:  # a store that is gone, mostly; the guard goes on alone
            if not self._stopped.is_set():
                logger.warning("rank %d: its watchdog can't reach the other ranks' any more", self._rank, exc_info=True)

    def _look(self) -> None:
        now = self._looked_at = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + self._beat_every_s
            self._board.beat(self._here())
        number = self._board.inquiry()
        if number > self._seen:
            self._take_part(number)
        elif self._patience.exhausted and now >= self._ask_again_at:
            if not self._watched.testify(self._patience).stands_still:
                return
            self._ask_again_at = now + max(1.0, self._patience.limit_s / 4)
            if self._board.open(self._seen + 1):
                self._hold(self._seen + 1)
            else:
                self._take_part(self._seen + 1)

    def _guard(self) -> None:
        """The other thread dead or stuck, and no progress: end this rank, with what it knows by itself."""
        patience = self._watched.patience()
        while not self._stopped.wait(max(self._options.poll_s, 0.5)):
            patience.look(time.monotonic())
            if patience.exhausted and time.monotonic() - self._looked_at > _GUARD_S + self._options.poll_s:
                own = self._watched.testify(patience)
                if own.stands_still:
                    tell(judge_alone(own), self._run_dir, tells=True)
                    leave_now()

    # --- an inquiry -------------------------------------------------------------------------------------------------

    def _here(self) -> Testimony:
        return Testimony.brief(self._rank, self._patience)

    def _take_part(self, number: int) -> None:
        said = self._testify(number)
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            if said.stands_still and self._watched.count() != said.count:
                self._board.withdraw(number)
            if (answer := self._board.read_answer(number)) is not None:
                if answer:
                    self._board.go(number)
                    if self._tells and self._run_dir is not None:
                        print_verdict(retold(self._run_dir, _FAREWELL_S))
                    leave_now(pid for where, pid in json.loads(answer) if where == machine.identity())
                return
            self._looked_at = time.monotonic()
            time.sleep(_LOOK_S)

    def _hold(self, number: int) -> None:
        """Be the judge."""
        said = self._testify(number)
        heard = self._hear(number)
        if self._watched.judge(heard) is not None:
            time.sleep(_SECOND_THOUGHTS_S)
            if self._watched.count() == said.count and not self._board.withdrawn(number):
                self._end(number, heard)
        self._board.answer(number, "")
        self._watched.carries_on(heard, self._board)

    def _end(self, number: int, heard: list[Testimony]) -> None:
        """Tell the verdict and leave. Only now silent ranks are asked: the signal could set one free."""
        verdict = self._watched.judge([one.probed() if one.state == "silent" else one for one in heard])
        assert verdict is not None
        be_the_one_who_leaves()
        tell(verdict, self._run_dir, tells=self._tells)
        if self._tells:
            spread(verdict.text(self._run_dir))
        silent = [(one.machine, one.pid) for one in verdict.ranks if one.state == "silent"]
        with suppress(Exception):  # the store may be gone by now; the verdict is out
            self._board.answer(number, json.dumps(silent or [("", 0)]))
            speakers = sum(one.state not in ("silent", "left") for one in verdict.ranks)
            deadline = time.monotonic() + _FAREWELL_S
            while self._board.gone(number) < speakers - 1 and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        leave_now(pid for where, pid in silent if where == machine.identity())

    def _testify(self, number: int) -> Testimony:
        self._seen = number
        testimony = self._watched.testify(self._patience)
        self._board.testify(number, testimony)
        return testimony

    def _hear(self, number: int) -> list[Testimony]:
        """What all ranks say; of those that say nothing, what is known of them."""
        opened = time.monotonic()
        while self._board.count(number) < self._world_size and (waited := time.monotonic() - opened) < _HEARING_S:
            self._looked_at = time.monotonic()
            if waited > _SILENCE_S and all(self._account_for(rank) for rank in self._missing(number)):
                break
            time.sleep(_LOOK_S if waited < _SILENCE_S else 5 * _LOOK_S)
        heard = [self._board.testimony(number, rank) for rank in range(self._world_size)]
        return [one or self._unheard(rank) for rank, one in enumerate(heard)]

    def _missing(self, number: int) -> list[int]:
        return [rank for rank in range(self._world_size) if self._board.testimony(number, rank) is None]

    def _account_for(self, rank: int) -> bool:
        """Whether there is no need to wait longer for a rank's testimony."""
        return self._unheard(rank).state != "moving"

    def _unheard(self, rank: int) -> Testimony:
        """What is known of a rank that does not say: it has left, its last beat is too old, or it is only slow."""
        beat = self._board.last_beat(rank)
        if beat is None:  # not watched yet
            return replace(self._here(), rank=rank, host="", machine="", pid=0, state="moving")
        age_s, last = beat
        if how := self._board.left(rank):
            return replace(last, state="left", note=how)
        process = state_of(last.pid) if last.is_here else "?"
        if process == "t":  # somebody looks into it with gdb
            return replace(last, state="paused")
        here = self._here()
        # no rank can be a step behind: where its beat is, it has come further since
        limit_s = last.limit_s if last.step == here.step else here.limit_s
        if age_s > limit_s or process in ENDED:
            # how far it has come can be known from the others, and its phase from nobody
            return replace(last, state="silent", seconds=age_s, step=max(last.step, here.step), phase="")
        return replace(last, state="moving")
