"""Where the time goes, and what is said of it."""

from __future__ import annotations

import pytest

from safetrain import activity
from safetrain.activity import Activity
from safetrain.phase_clock import HostClock
from safetrain.timing import Machine, StepClock, TimeTable, advice, shares_in_words

EVEN = dict.fromkeys(("data", "forward", "backward", "communication", "optimizer", "logging", "checkpoints"), 1.0)
COMPUTE = {**dict.fromkeys(EVEN, 0.0), "forward": 30.0, "backward": 60.0, "optimizer": 5.0}


def test_a_lap_is_what_was_spent_in_each_part_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(activity, "monotonic", lambda: now[0])
    mine = Activity()

    def be(phase: str, seconds: float) -> None:
        mine.enter(phase)
        now[0] += seconds

    be("data", 7.0)
    be("training_step", 0.0)
    clock = StepClock(HostClock(mine))
    for _ in range(2):
        be("data", 1.0)
        be("sync_buffers", 0.125)
        be("training_step", 2.0)
        with mine.within("save_checkpoint"):
            now[0] += 0.5
        now[0] += 1.0
        be("backward", 4.0)
        be("vote", 0.25)
        be("validation", 9.0)
    mine.enter("data")
    assert clock.lap() == {
        "data": 2.0, "forward": 6.0, "backward": 8.0, "communication": 0.75, "optimizer": 0.0, "logging": 0.0,
        "checkpoints": 1.0,
    }  # fmt: skip
    assert set(clock.lap().values()) == {0.0}


def test_a_short_run_gets_its_shares_and_no_advice() -> None:
    for seconds, advised in ((0.9, False), (1.1, True)):
        table = TimeTable(0, 1)
        table.add(table.row({**dict.fromkeys(EVEN, 0.0), "data": seconds}), steps=10)
        said = table.summary(Machine(0, 12))
        assert said.startswith(f"a step took {1000 * seconds:.3g} ms: data 100 %.")
        assert ("loader.num_workers" in said) is advised


def test_shares_are_sorted_and_small_ones_left_out() -> None:
    seconds = {**COMPUTE, "logging": 0.2}
    assert shares_in_words(seconds) == "backward 63 %, forward 32 %, optimizer 5 %"
    assert shares_in_words(dict.fromkeys(EVEN, 0.0)) == ""


@pytest.mark.parametrize(
    ("seconds", "machine", "words"),
    [
        (COMPUTE, Machine(0, 4), ""),
        ({**COMPUTE, "data": 65.0}, Machine(2, 12), "41 % of the time waits for data: loader.num_workers=4 (now 2)"),
        ({**COMPUTE, "data": 65.0}, Machine(0, 12), "loader.num_workers=2 (now 0)"),
        ({**COMPUTE, "data": 900.0}, Machine(0, 4), "90 % of the time waits for data: loader.num_workers=3 (now 0)"),
        ({**COMPUTE, "data": 65.0}, Machine(0, 1), "41 % of the time waits for data: a rank has 1 core here. Make a"),
        (
            {**COMPUTE, "data": 65.0},
            Machine(1, 2, 2, "num_workers of your DataLoader"),
            "num_workers of your DataLoader",
        ),
        ({**COMPUTE, "data": 65.0, "logging": 10.0}, Machine(2, 12), "waits for data"),  # the largest share comes first
        ({**COMPUTE, "communication": 95.0, "logging": 11.0}, Machine(2, 12), "waits for other ranks"),
        ({**COMPUTE, "communication": 95.0}, Machine(0, 4, ranks=1), ""),
        ({**COMPUTE, "logging": 10.0}, Machine(0, 4), "10 % of the time goes into logging: raise loop.log_every_steps"),
        ({**COMPUTE, "checkpoints": 10.0}, Machine(0, 4), "10 % of the time goes into checkpoints: save less often"),
        (
            {**COMPUTE, "communication": 95.0},
            Machine(0, 4),
            "50 % of the time waits for other ranks, and for",
        ),
        (dict.fromkeys(EVEN, 0.0), Machine(0, 4), ""),
    ],
)
def test_advice_has_the_share_the_remedy_and_its_number(
    seconds: dict[str, float], machine: Machine, words: str
) -> None:
    said = advice(seconds, machine)
    assert words in said
    assert bool(said) is bool(words)
