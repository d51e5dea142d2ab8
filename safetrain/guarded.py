"""A script that knows nothing of safetrain, as the watchdog sees it (watchdog.py asks, this answers).

It enters no phases, so progress is what its groups issue, and a standstill is that nothing is issued while some rank
waits in a collective. Who is waited for may be at work, for long: that is a warning first, and a verdict after another,
longer time (stillness.py tells the two apart).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from safetrain import joining, stalled
from safetrain.activity import Activity
from safetrain.advice import SCRIPT
from safetrain.board import Board, MemoryStore
from safetrain.flight_recorder import last_collectives
from safetrain.guard_options import GuardOptions
from safetrain.patience import Patience
from safetrain.script_groups import progress
from safetrain.stillness import Stillness, cpu_seconds, place_of
from safetrain.telling import alike, names, tell, verb
from safetrain.testimony import State, Testimony
from safetrain.verdict import Verdict

_UNDER_WAY = 20  # collectives: then making groups and DDP, and a first step, are done
_SETTLED_S = 0.5  # shorter waits are not looked into
_AS_LONG = 0.8
_LOOKS_IN_A_ROW = 100  # then they become rarer


class ScriptPatience(Patience):
    """How long a script may go without a collective.

    Where it waits in one that has a time limit of its own, only until shortly before that: torch would end the job,
    and blame those who waited.
    """

    def __init__(self, options: GuardOptions, activity: Activity) -> None:
        super().__init__(options.watchdog(), activity)
        self._guard_options = options
        self._group_limit_s: float | None = None

    def look(self, now: float) -> None:
        count = progress()
        if count != self.activity.count:
            self.activity.count, self.activity.since = count, now
        super().look(now)
        if self.seconds < _SETTLED_S:
            self._group_limit_s = None
        elif self._group_limit_s is None:
            limits = [one.timeout_s for one in last_collectives() if not one.done and one.timeout_s]
            self._group_limit_s = before(min(limits)) if limits else math.inf

    @property
    def last_chance(self) -> bool:
        """Whether the limit is that of the collective itself."""
        return self.limit_s < self._usual_limit_s

    @property
    def limit_s(self) -> float:
        return min(self._usual_limit_s, self._group_limit_s or math.inf)

    @property
    def wait_limit_s(self) -> float:
        return self.limit_s

    @property
    def compile_limit_s(self) -> float:
        return min(self._guard_options.first_stall_s, self._group_limit_s or math.inf)

    @property
    def _usual_limit_s(self) -> float:
        under_way = self.activity.count >= _UNDER_WAY
        return self._guard_options.stall_s if under_way else self._guard_options.first_stall_s


def before(timeout_s: float) -> float:
    """When to ask where a collective fails by itself after ``timeout_s``: all ranks are to be heard before."""
    return max(timeout_s / 2, timeout_s - max(2.5, min(10.0, timeout_s / 10)))


class Guarded:
    """This process' script.

    Attributes:
        left: how it has left the others, in words; empty while it takes part.
    """

    def __init__(
        self, rank: int, world_size: int, local_rank: int, options: GuardOptions, look_round: Callable[[Board], None],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.thread = threading.get_ident()
        self.left = ""
        self._options, self._look_round, self._say = options, look_round, say
        self._activity = Activity()
        self._activity.restart(SCRIPT)
        self._activity.count = progress()
        self._stillness, self._looked_at = Stillness(), 0.0
        self._alone = MemoryStore()

    def board(self) -> Board:
        return Board(self._alone if self.world_size == 1 else joining.connection("guard"), self.rank)

    def patience(self) -> Patience:
        return ScriptPatience(self._options, self._activity)

    def count(self) -> int:
        return progress()

    def look(self, patience: Patience, board: Board) -> None:
        self._look_round(board)
        now = time.monotonic()
        if patience.seconds < _SETTLED_S:
            self._stillness.forget()
        elif now - self._looked_at >= patience.seconds / _LOOKS_IN_A_ROW:
            self._looked_at = now
            self._stillness.look(now, cpu_seconds(), place_of(self.thread))

    def testify(self, patience: Patience) -> Testimony:
        one = Testimony.full(self.rank, patience, self.thread, ())
        if self.left:
            return replace(one, state="left", note=self.left)
        last_chance = isinstance(patience, ScriptPatience) and patience.last_chance
        at_work = self._stillness.is_busy
        state = "busy" if one.state == "stuck" and at_work else one.state
        return replace(one, state=state, at_work=at_work, last_chance=last_chance)

    def judge(self, heard: Sequence[Testimony]) -> Verdict | None:
        return judge(heard, self._options.busy_s)

    def carries_on(self, heard: Sequence[Testimony], board: Board) -> None:
        for said in warnings(heard, self._options.busy_s):
            busy = next(one for one in heard if one.state == "busy")
            if board.first_to_say(f"busy/{busy.rank}/{busy.count}"):
                self._say(said)


def judge(heard: Sequence[Testimony], busy_s: float) -> Verdict | None:
    """The verdict on a script of which some rank issues no collective; None where it may go on."""
    heard = with_the_last_chance(heard)
    waiting, busy = ([one for one in heard if one.state == state] for state in ("waiting", "busy"))
    if any(one.state == "paused" for one in heard):
        return None
    if busy:
        ending = any(one.last_chance for one in waiting)
        too_long = max(one.seconds for one in busy) > busy_s or ending
        limited = [one if ending else replace(one, limit_s=busy_s) for one in busy]
        return (
            stalled.stands(limited, [*limited, *(o for o in heard if o.state != "busy")])
            if waiting and too_long
            else None
        )
    if not waiting and not all(one.state in ("stuck", "silent") and one.collectives for one in heard):
        return None  # nobody is held up by another
    return stalled.judge(heard)


def with_the_last_chance(heard: Sequence[Testimony]) -> list[Testimony]:
    """Where the group of ranks that wait is about to give up, what the others' own limits allow is no matter: those
    that have made no progress for as long hold them up."""
    ending = [one for one in heard if one.state == "waiting" and one.last_chance]
    if not ending:
        return list(heard)
    limit_s = min(one.limit_s for one in ending)

    def seen(one: Testimony) -> Testimony:
        if one.state != "moving" or one.seconds < _AS_LONG * limit_s:
            return one
        state: State = "waiting" if one.pending else "busy" if one.at_work else "stuck"
        return replace(one, state=state, limit_s=limit_s, last_chance=True)

    return [seen(one) for one in heard]


def warnings(heard: Sequence[Testimony], busy_s: float) -> list[str]:
    """What to say of ranks that hold others up and are at work: one sentence, or none."""
    waiting, busy = ([one for one in heard if one.state == state] for state in ("waiting", "busy"))
    if not waiting or not busy:
        return []
    first = busy[0]
    same = [one for one in busy if one.user_frame == first.user_frame]
    at = f" at {first.user_frame}" if first.user_frame else ""
    others = " ".join(tell(group) for group in alike(waiting))
    return [
        f"{names(same).capitalize()} {verb(same, 'has', 'have')} been{at} for {first.seconds:.0f} s, at work. {others} "
        f"The job goes on; it is ended after {busy_s:g} s (--busy-s)."
    ]
