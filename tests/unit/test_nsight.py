"""The loop's phases as NVTX ranges, with a device that notes what it is told."""

from __future__ import annotations

import pytest
import torch

from safetrain.activity import ACTIVITY
from safetrain.errors import UsageError
from safetrain.nsight import NsightRanges
from safetrain.observer import Event, RunInfo


def run(device: str, start_step: int = 0) -> RunInfo:
    return RunInfo(0, 1, None, "mine", 1, None, None, start_step, "", device, 10)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    return calls


def test_phases_of_the_window_are_ranges(told: list[str]) -> None:
    ranges = NsightRanges(start=2, count=1)
    ranges.start(run("cuda:0"))
    for step in range(1, 5):
        for phase in ("data", "backward", "log"):
            ACTIVITY.enter(phase)
        ranges.step(step, 0)
    assert told == [
        "start", "push log", "pop", "push data", "pop", "push backward", "pop", "push log", "pop", "stop",
    ]  # fmt: skip
    assert not ACTIVITY.listeners


def test_a_run_that_ends_in_the_window_ends_the_capture(told: list[str]) -> None:
    ranges = NsightRanges(start=0, count=9)
    ACTIVITY.enter("build")
    ranges.start(run("cuda:0", start_step=7))  # the window is behind it: its first steps are taken
    ranges.event(Event("train", 8, 0))
    ranges.event(Event("end", 8, 0))
    ranges.close()
    assert told == ["start", "push build", "pop", "stop"]


def test_it_needs_a_gpu() -> None:
    with pytest.raises(UsageError, match="profile=nsight needs a GPU, and ranks compute on CPUs here"):
        NsightRanges().start(run("cpu"))
