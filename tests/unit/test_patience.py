"""How long a phase may take: generous at first, adaptive after that, blind to time in which the process did not run."""

from __future__ import annotations

import math

from safetrain.activity import Activity
from safetrain.config import Watchdog
from safetrain.patience import Patience

STALL_S, FIRST_S = 10.0, 100.0


class Clock:
    """Looks every quarter of a second."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.patience = Patience(Watchdog(stall_s=STALL_S, first_step_stall_s=FIRST_S), self.activity)
        self.now = 0.0
        self.patience.look(self.now)

    def stay(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.patience.look(self.now)

    def phase(self, name: str, seconds: float = 0.25) -> None:
        self.activity.enter(name)
        self.stay(seconds)

    def step(self, seconds: float = 0.25) -> None:
        for name in ("data", "training_step", "backward", "vote", "optimizer", "log"):
            self.phase(name, seconds)


def test_the_first_step_may_take_long() -> None:
    clock = Clock()
    clock.phase("data")
    clock.phase("training_step")
    assert clock.patience.limit_s == FIRST_S
    clock.step()
    clock.phase("training_step")
    assert clock.patience.limit_s == STALL_S


def test_so_may_the_first_time_of_any_phase() -> None:
    clock = Clock()
    clock.step()
    clock.phase("validation")
    assert clock.patience.limit_s == FIRST_S
    clock.phase("validation")
    assert clock.patience.limit_s == STALL_S


def test_but_not_to_wait_for_others() -> None:
    clock = Clock()
    clock.phase("vote")
    assert clock.patience.wait_limit_s == FIRST_S
    clock.step()
    clock.phase("barrier:saved")
    assert (clock.patience.limit_s, clock.patience.wait_limit_s) == (FIRST_S, STALL_S)


def test_a_new_run_is_new() -> None:
    clock = Clock()
    clock.step()
    clock.activity.restart("build")
    clock.phase("training_step")
    assert clock.patience.limit_s == FIRST_S


def test_it_adapts_to_the_longest_of_the_phase() -> None:
    clock = Clock()
    clock.step()
    clock.step(4.0)
    clock.phase("training_step")
    assert 36 <= clock.patience.limit_s <= 40
    clock.phase("elsewhere")
    clock.phase("elsewhere")
    assert clock.patience.limit_s == STALL_S


def test_it_does_not_learn_from_a_first_time_or_from_what_was_too_long() -> None:
    clock = Clock()
    clock.step(50.0)
    clock.phase("training_step")
    assert clock.patience.limit_s == STALL_S
    clock.stay(30.0)
    clock.phase("training_step")
    assert clock.patience.limit_s == STALL_S


def test_a_limit_of_its_own() -> None:
    clock = Clock()
    clock.step()
    with clock.activity.within("rank_zero:export", 600):
        clock.stay(STALL_S * 2)
        assert (clock.patience.limit_s, clock.patience.exhausted) == (600, False)
    with clock.activity.within("paused", math.inf):
        clock.stay(STALL_S * 2)
        assert not clock.patience.exhausted


def test_exhausted() -> None:
    clock = Clock()
    clock.step()
    clock.phase("training_step", STALL_S - 1)
    assert not clock.patience.exhausted
    clock.stay(2)
    assert clock.patience.exhausted
    clock.phase("training_step")
    assert not clock.patience.exhausted


def test_time_in_which_the_process_did_not_run_does_not_count() -> None:
    clock = Clock()
    clock.step()
    clock.phase("training_step")
    clock.now += 3600
    clock.patience.look(clock.now)
    assert clock.patience.seconds < 2
