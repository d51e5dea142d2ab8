"""What backward hides of the all-reduces, from the moments that were noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safetrain import overlap
from safetrain.overlap import BucketOverlap, BucketTimes, Overlap, in_words


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Bucket:
    """What DDP hands to a communication hook."""

    def __init__(self, index: int, numbers: int) -> None:
        self._index, self._numbers = index, numbers

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return torch.zeros(self._numbers)


class Future:
    """Done when told to."""

    def then(self, done: Any) -> Any:
        self.done = lambda: done(SimpleNamespace(value=lambda: torch.zeros(1)))
        return self


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(overlap.time, "perf_counter", made.perf_counter)
    return made


def _step(times: BucketTimes, clock: Clock, start_s: float) -> None:
    """Bucket 0 is reduced from 1 to 5, bucket 1 from 4 to 9; backward ends at 6."""
    futures = [Future(), Future()]
    hook = times.hook(lambda state, bucket: futures[bucket.index()])
    clock.now_s = start_s + 1
    hook(None, Bucket(0, 1000))
    clock.now_s = start_s + 4
    hook(None, Bucket(1, 500))
    clock.now_s = start_s + 5
    futures[0].done()
    clock.now_s = start_s + 6
    backward_ended = times.now()
    clock.now_s = start_s + 9
    futures[1].done()
    times.step_done(backward_ended)


def test_what_runs_after_backward_is_exposed(clock: Clock) -> None:
    times = BucketTimes(torch.device("cpu"))
    for start_s in (0, 100, 200):
        _step(times, clock, start_s)
    assert times.overlap(first=1) == Overlap([BucketOverlap(0, 4000, 4, 0), BucketOverlap(1, 2000, 5, 3)], 3)


def test_in_words() -> None:
    seen = Overlap([BucketOverlap(0, 4 << 20, 0.004, 0), BucketOverlap(1, 1 << 20, 0.005, 0.003)], 0.003)
    assert in_words(seen).splitlines() == [
        "bucket      MiB  all-reduce ms  exposed ms   hidden",
        "     0     4.00           4.00        0.00    100 %",
        "     1     1.00           5.00        3.00     40 %",
        "Backward hides 67 % of the all-reduces' time; a step waits 3.00 ms for them.",
    ]
