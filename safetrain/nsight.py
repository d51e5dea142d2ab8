"""The loop's phases as NVTX ranges for Nsight Systems, in a window of steps.

nsys profile -c cudaProfilerApi -t cuda,nvtx,osrt python -m safetrain recipe=... profile=nsight
"""

from __future__ import annotations

import torch

from safetrain.activity import ACTIVITY
from safetrain.errors import UsageError
from safetrain.observer import Event, RunInfo


class NsightRanges:
    """An observer that marks ``count`` steps from step ``start`` on (the first has number 0), and has Nsight capture
    them, where it waits for that (``-c cudaProfilerApi``).

    Raises:
        UsageError: in ``start``, on all ranks: they compute on CPUs.
    """

    def __init__(self, start: int = 20, count: int = 5) -> None:
        self._start, self._count = start, count
        self._open = False

    def start(self, run: RunInfo) -> None:
        if run.device == "cpu":
            raise UsageError("profile=nsight needs a GPU, and ranks compute on CPUs here: profile=steps records those")
        self._first = max(self._start, run.start_step)
        self.step(run.start_step, 0)

    def step(self, step: int, epoch: int) -> None:
        if step == self._first and not self._open:
            torch.cuda.profiler.start()
            torch.cuda.nvtx.range_push(ACTIVITY.phase)
            ACTIVITY.listen(self._entered)
            self._open = True
        elif step == self._first + self._count:
            self._end()

    def event(self, event: Event) -> None:
        if event.kind == "end":
            self._end()

    def close(self) -> None:
        ACTIVITY.leave(self._entered)  # after a failure no more: to end the capture may wait for the device
        self._open = False

    def _entered(self, phase: str) -> None:
        torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_push(phase)

    def _end(self) -> None:
        if self._open:
            self._open = False
            ACTIVITY.leave(self._entered)
            torch.cuda.nvtx.range_pop()
            torch.cuda.profiler.stop()
