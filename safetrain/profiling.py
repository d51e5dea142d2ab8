"""A window of steps recorded by torch.profiler on every rank, as one trace in the run directory.

Each rank writes its own part, and waits for nobody; a thread of rank 0 joins the parts when all are there. Before and
after the window an observer's call a step is all it costs.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
from pathlib import Path
from time import monotonic, time_ns

from torch.profiler import ProfilerActivity, profile

from safetrain import rank_log
from safetrain.activity import ACTIVITY
from safetrain.flight_recorder import last_collectives
from safetrain.observer import Event, RunInfo
from safetrain.profile import TRACES, told
from safetrain.trace_merge import merge, part_path
from safetrain.trace_part import Call, Mark, Recorded, build_part, write_part

logger = logging.getLogger("safetrain")

_AFTER_A_STEP = ("log", "save_checkpoint")  # they still belong to the step before
_PARTS_WITHIN_S = 60.0  # the others have been at the same step; writing takes seconds where there is much
_AT_THE_END_WITHIN_S = 10.0
_LONGEST_MERGE_S = 600.0  # of gigabytes
_AFTER_A_FAILURE_S = 1.0  # what failed is to be told first
_GRACE_S = 10.0
_WRITE_LIMIT_S = 600.0
_ALL_RECORDED = 1 << 30
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StepProfile:
    """An observer that records ``count`` steps from step ``start`` on (the first has number 0).

    A run that goes on behind ``start`` records its first steps. ``stacks`` and ``shapes``: of each operator.
    """

    def __init__(self, start: int = 20, count: int = 5, *, stacks: bool = True, shapes: bool = True) -> None:
        self._start, self._count, self._stacks, self._shapes = start, count, stacks, shapes
        self._run: RunInfo | None = None
        self._profiler: profile | None = None
        self._recorded = False
        self._merging: threading.Thread | None = None
        self._merge_until = 0.0

    def start(self, run: RunInfo) -> None:
        if run.run_dir is None:
            logger.warning("profile: nothing is recorded, since the run has no directory to write to")
            return
        self._run, self._step = run, run.start_step
        self._marks: list[Mark] = []
        self._recording = self._recorded = self._ended = False
        self._first = max(self._start, run.start_step)
        self._last = self._first + self._count - 1
        self._traces, self._name = run.run_dir / TRACES, f"steps_{self._first}-{self._last}"
        # of an earlier process of this run: rank 0 must not find it when the window is over
        part_path(self._traces, self._name, run.rank).unlink(missing_ok=True)
        self.step(run.start_step, 0)

    def step(self, step: int, epoch: int) -> None:
        self._step = step
        if self._run is not None and step in (self._first - 1, self._first) and self._profiler is None:
            # one step before the window: the first start on a GPU takes seconds, and slows what comes next
            on_gpu = [ProfilerActivity.CUDA] if self._run.device != "cpu" else []
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *on_gpu], record_shapes=self._shapes, with_stack=self._stacks
            )
            self._profiler.prepare_trace()
        if self._run is not None and step == self._first and not self._recorded:
            ACTIVITY.listen(self._entered)

    def event(self, event: Event) -> None:
        if event.kind != "end" or self._run is None:
            return
        self._ended = True
        if self._recording:
            self._marks.append(Mark(time_ns(), ACTIVITY.step, ""))
            self._finish()
        elif not self._recorded:
            self._say(f"nothing was recorded: the run ended after {event.step} steps, and profile.start is "
                      f"{self._start}. Choose a smaller one.")  # fmt: skip

    def close(self) -> None:
        if self._run is None:
            return
        ACTIVITY.leave(self._entered)
        if self._merging is not None:
            self._merge_until = min(self._merge_until, monotonic() + _AT_THE_END_WITHIN_S)
            limit_s = _LONGEST_MERGE_S if self._ended else _AFTER_A_FAILURE_S
            with ACTIVITY.within("save_profile", limit_s + _GRACE_S):
                self._merging.join(limit_s)
        if not self._ended and not self._recorded:  # its own words come first, and must not wait for a file
            when = f"before profile.start={self._start}" if not self._recording else "while it was recorded"
            self._say(f"nothing is written: the run failed at step {self._step}, {when}")
        if self._profiler is not None and self._run.device == "cpu":  # on a GPU it would wait for a peer that is gone
            self._profiler.stop_trace()
        self._run = self._profiler = self._merging = None
        self._recording = False

    def _entered(self, phase: str) -> None:
        """The loop has entered a phase, somewhere between the end of the step before the window and its end."""
        assert self._profiler is not None
        if not self._recording:
            if phase in _AFTER_A_STEP or ACTIVITY.step != self._first:
                return
            self._recording = True
            self._profiler.start_trace()
        self._marks.append(Mark(time_ns(), ACTIVITY.step, phase))
        if self._step > self._last and phase not in _AFTER_A_STEP:
            self._finish()

    def _finish(self) -> None:
        """End the recording, write this rank's part, and have rank 0 look for the others'."""
        assert self._run is not None
        assert self._profiler is not None
        ACTIVITY.leave(self._entered)
        profiler, self._profiler = self._profiler, None
        self._recording, self._recorded = False, True
        with ACTIVITY.within("save_profile", _WRITE_LIMIT_S):
            profiler.stop_trace()
            try:
                self._write(profiler, part_path(self._traces, self._name, self._run.rank))
            except OSError as error:
                logger.warning("rank %d: its part of the trace is not written: %s", self._run.rank, error)
        if self._run.rank == 0:
            self._merge_until = monotonic() + _PARTS_WITHIN_S
            self._merging = threading.Thread(
                target=self._merge,
                args=(self._traces, self._name, self._run.world_size),
                name="safetrain-profile",
                daemon=True,
            )
            self._merging.start()

    def _say(self, text: str) -> None:
        if self._run is not None and self._run.rank == 0:
            rank_log.say(f"profile: {text}")

    def _write(self, profiler: profile, path: Path) -> None:
        assert self._run is not None
        since, until = self._marks[0].ns, self._marks[-1].ns
        calls = {  # in a CUDA build two recorders may hold the same
            (one.group, one.number): Call(
                one.group, one.about, one.members, one.number, one.op, one.shapes, one.dtype, one.issued_ns, None
            )
            for one in last_collectives(_ALL_RECORDED)
            if one.issued_ns is not None and since <= one.issued_ns <= until
        }
        with tempfile.TemporaryDirectory(prefix="safetrain-") as folder:
            exported = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(exported))
            recorded = Recorded(json.loads(exported.read_bytes()), os.getpid(), self._marks, list(calls.values()))
        host = socket.gethostname()
        write_part(path, *build_part(recorded, self._run.rank, self._run.world_size, machine_of(host), host))

    def _merge(self, traces: Path, name: str, world_size: int) -> None:
        parts = [part_path(traces, name, rank) for rank in range(world_size)]
        tick = threading.Event()
        while not all(part.exists() for part in parts) and monotonic() < self._merge_until:
            tick.wait(0.05)
        there = [part for part in parts if part.exists()]
        if not there:
            return
        try:
            rank_log.say(told(merge(traces, name, there)))
        except OSError as error:
            logger.warning("the parts of the trace in %s are not merged: %s", traces, error)


def machine_of(host: str) -> str:
    """What all processes share that read the same clock: containers of one machine have names of their own."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else host
