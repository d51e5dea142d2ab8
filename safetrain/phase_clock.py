"""Seconds in each phase of the loop: of the host, or of the device's stream, which is where they go on a GPU.

On a GPU the host only enqueues, so its own times say little. An event is recorded as each phase is entered (some 5 µs),
and read when the device has passed it, one logging interval later as a rule: nobody waits for the device. What a stream
idles until the host has a batch for it is time of the phase ``data``, and only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from safetrain.activity import Activity

_MOST_MARKS = 256  # unread; a validation enters a phase a batch, and nobody reads meanwhile


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, later: Any, /) -> float: ...


class PhaseClock(Protocol):
    def read(self) -> Mapping[str, float]:
        """Seconds in each phase so far."""

    def close(self) -> None:
        """Note no more."""


class HostClock:
    """Of the host: what the loop has noted anyway."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def read(self) -> Mapping[str, float]:
        return self._activity.spent

    def close(self) -> None:
        """Nothing is held."""


class DeviceClock:
    """Of a device's stream, as far as it has come."""

    def __init__(self, activity: Activity, new_event: Callable[[], Event]) -> None:
        self._activity, self._new_event = activity, new_event
        self._spent: dict[str, float] = {}
        self._marks: deque[tuple[str, Event]] = deque()
        self._unused: list[Event] = []
        activity.listen(self._enter)

    def _enter(self, phase: str) -> None:
        event = self._unused.pop() if self._unused else self._new_event()
        event.record()
        self._marks.append((phase, event))
        if len(self._marks) > _MOST_MARKS:
            self.read()

    def read(self) -> Mapping[str, float]:
        marks = self._marks
        while len(marks) > 1 and marks[1][1].query():
            phase, event = marks.popleft()
            self._spent[phase] = self._spent.get(phase, 0.0) + event.elapsed_time(marks[0][1]) / 1000
            self._unused.append(event)
        return self._spent

    def close(self) -> None:
        self._activity.leave(self._enter)


def phase_clock(activity: Activity, device: torch.device) -> PhaseClock:
    """The one that says where a step's time goes on ``device``."""
    if device.type == "cuda":
        return DeviceClock(activity, lambda: torch.cuda.Event(enable_timing=True))
    return HostClock(activity)
