"""Where a device's time goes: events that are read when the device has passed them, and never waited for."""

from __future__ import annotations

import torch

from safetrain.activity import Activity
from safetrain.phase_clock import DeviceClock, HostClock, phase_clock
from safetrain.timing import StepClock


class Stream:
    """A device on which each phase takes ``takes_ms``; it has come to ``at_ms``."""

    def __init__(self) -> None:
        self.at_ms = 0.0
        self.enqueued_ms = 0.0
        self.events = 0

    def event(self) -> Mark:
        self.events += 1
        return Mark(self)


class Mark:
    def __init__(self, stream: Stream) -> None:
        self._stream, self._passed_ms = stream, -1.0

    def record(self) -> None:
        self._passed_ms = self._stream.enqueued_ms

    def query(self) -> bool:
        return self._stream.at_ms >= self._passed_ms

    def elapsed_time(self, later: Mark, /) -> float:
        assert later.query(), "this would wait for the device"
        return later._passed_ms - self._passed_ms


def _enqueue(activity: Activity, stream: Stream, phase: str, takes_ms: float) -> None:
    activity.enter(phase)
    stream.enqueued_ms += takes_ms


def test_a_device_that_is_behind_is_read_later() -> None:
    activity, stream = Activity(), Stream()
    clock = DeviceClock(activity, stream.event)
    laps = StepClock(clock)
    for _ in range(2):
        for phase, takes_ms in (("data", 0), ("training_step", 30), ("backward", 60), ("vote", 4), ("optimizer", 6)):
            _enqueue(activity, stream, phase, takes_ms)
    stream.at_ms = 95  # in the vote of the first step
    first = laps.lap()
    assert {part: round(seconds, 6) for part, seconds in first.items() if seconds} == {
        "forward": 0.03,
        "backward": 0.06,
        "communication": 0.004,
    }
    activity.enter("data")
    stream.at_ms = 200
    second = laps.lap()
    assert {part: round(seconds, 6) for part, seconds in second.items() if seconds} == {
        "forward": 0.03, "backward": 0.06, "communication": 0.004, "optimizer": 0.012,
    }  # fmt: skip


def test_events_are_used_again_and_what_nobody_reads_stays_bounded() -> None:
    activity, stream = Activity(), Stream()
    clock = DeviceClock(activity, stream.event)
    for _ in range(5000):
        _enqueue(activity, stream, "validation", 1)
        stream.at_ms = stream.enqueued_ms
    assert stream.events <= 258
    assert round(clock.read()["validation"], 6) == 4.999
    clock.close()
    activity.enter("data")
    assert activity.listeners == ()
    assert stream.events <= 258


def test_on_a_cpu_it_is_the_hosts_time_and_nobody_listens() -> None:
    activity = Activity()
    clock = phase_clock(activity, torch.device("cpu"))
    assert isinstance(clock, HostClock)
    assert activity.listeners == ()
    activity.enter("backward")
    activity.enter("vote")
    assert clock.read()["backward"] == activity.spent["backward"]
