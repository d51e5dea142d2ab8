"""Memory of all ranks, on the host and on the device, in each phase of a step: read at the logging interval.

On a GPU a phase's number is the most that was allocated in it (the device's own counters, which do not synchronise); on
a CPU it is what the process holds at the phase's end. Phases are looked at in one step a second at most.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from safetrain import limits
from safetrain.activity import Activity
from safetrain.finding import size
from safetrain.memory_growth import GrowthWatch
from safetrain.timing import PARTS

_PHASES = tuple(dict.fromkeys(PARTS.values()))
_LOOKS_EVERY_S = 1.0  # a look at phases and limits costs a millisecond
_LOW_SHARE, _LOW_BYTES = 0.05, 2 << 30  # of the host's memory: less than either is close to the kernel's killer
_WORTH_A_WORD = 1.05  # a phase's use, of the smallest one's
_MIB = 1 << 20


class Reading(NamedTuple):
    """What one rank's memory is, in bytes; of a device 0 where there is none.

    ``used``: now; ``peak``: ever; ``left``: to be had before there is none; ``limit``: all that may be used.
    """

    host_used: float = 0
    host_peak: float = 0
    host_left: float = 0
    host_limit: float = 0
    device_used: float = 0
    device_peak: float = 0
    device_left: float = 0
    device_limit: float = 0


class MemoryMeter:
    """Reads this rank's memory."""

    def __init__(self, activity: Activity, device: torch.device) -> None:
        self._activity, self._device = activity, device
        self._on_gpu = device.type == "cuda"
        self._phase, self._looked_at = "", -_LOOKS_EVERY_S
        self._device_peak = 0.0
        self.by_phase = dict.fromkeys(_PHASES, 0.0)
        self._slow: tuple[float, float, float, float, float] | None = None

    def look_at_next_step(self) -> None:
        """The next step is the last one before a reading: see what each phase takes, if that was not just done."""
        if monotonic() - self._looked_at >= _LOOKS_EVERY_S:
            self._looked_at, self._phase = monotonic(), ""
            self._slow = None
            self._activity.listen(self._entered)

    def read(self) -> Reading:
        """Now, after the step that was looked at."""
        self._activity.leave(self._entered)
        self._note_peak()
        if self._slow is None:
            device = torch.cuda.mem_get_info(self._device) if self._on_gpu else (0, 0)
            self._slow = peak_bytes(), limits.memory_left(), limits.memory_limit(), *device
        peak, left, limit, free, total = self._slow
        used = resident_bytes()
        allocated = torch.cuda.memory_allocated(self._device) if self._on_gpu else 0
        cached = torch.cuda.memory_reserved(self._device) - allocated if self._on_gpu else 0
        return Reading(used, max(peak, used), left, limit, allocated, self._device_peak, free + cached, total)

    def close(self) -> None:
        """Look at nothing more."""
        self._activity.leave(self._entered)

    def _entered(self, phase: str) -> None:
        """The phase before has ended."""
        part = PARTS.get(self._phase)
        self._phase = phase
        if self._on_gpu:
            held = self._note_peak()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            held = resident_bytes()
        if part is not None:
            self.by_phase[part] = max(self.by_phase[part], held)

    def _note_peak(self) -> float:
        peak = float(torch.cuda.max_memory_allocated(self._device)) if self._on_gpu else 0.0
        self._device_peak = max(self._device_peak, peak)
        return peak


class MemoryTable:
    """All ranks' memory, put together at each logging interval; the same on every rank.

    Attributes:
        readings: of the last interval, by rank.
    """

    def __init__(self, rank: int, world_size: int, sharers: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._width = len(Reading._fields) + len(_PHASES)
        self._watches = {"host": GrowthWatch("host", sharers), "device": GrowthWatch("device", 1)}
        self._low_before = self._told_low = False
        self.readings: list[Reading] = []
        self._by_phase: list[dict[str, float]] = []

    def row(self, meter: MemoryMeter) -> list[float]:
        """What this rank adds to a sum over ranks: its numbers, in places that are its alone."""
        row = [0.0] * (self._width * self._world_size)
        row[self._width * self._rank : self._width * (self._rank + 1)] = [*meter.read(), *meter.by_phase.values()]
        return row

    def add(self, summed: Sequence[float]) -> None:
        """The sum of all ranks' rows."""
        kinds = len(Reading._fields)
        rows = [summed[at : at + self._width] for at in range(0, len(summed), self._width)]
        self.readings = [Reading(*row[:kinds]) for row in rows]
        self._by_phase = [dict(zip(_PHASES, row[kinds:], strict=True)) for row in rows]

    def metrics(self) -> dict[str, float]:
        """The largest over ranks, in MiB, and whose it is; of what is left, the least."""
        found: dict[str, float] = {}
        for kind in self._kinds():
            peaks = [getattr(one, f"{kind}_peak") for one in self.readings]
            found[f"memory/{kind}_peak_mib"] = max(peaks) / _MIB
            found[f"memory/{kind}_peak_rank"] = float(peaks.index(max(peaks)))
            found[f"memory/{kind}_left_mib"] = min(getattr(one, f"{kind}_left") for one in self.readings) / _MIB
        for phase in _PHASES:
            if most := max(one[phase] for one in self._by_phase):
                found[f"memory/{phase}_mib"] = most / _MIB
        return found

    def warnings(self, step: int, total_steps: int | None) -> list[str]:
        """To be asked once an interval: what will run out, or nearly has."""
        said = []
        for kind in self._kinds():
            used = [getattr(one, f"{kind}_used") for one in self.readings]
            left = [getattr(one, f"{kind}_left") for one in self.readings]
            if growth := self._watches[kind].judge(step, used, left, total_steps):
                said.append(str(growth))
        least = min(range(self._world_size), key=lambda rank: self.readings[rank].host_left)
        one = self.readings[least]
        low = 0 < one.host_left < min(_LOW_BYTES, _LOW_SHARE * one.host_limit)
        if low and self._low_before and not self._told_low:
            self._told_low = True
            said.append(
                f"memory is nearly full: {size(one.host_left)} of {size(one.host_limit)} are left on the machine of "
                f"rank {least} (or in its container); where there is none, the kernel kills a process without a word. "
                "Fewer loader processes (loader.num_workers) or smaller batches take less."
            )
        self._low_before = low
        return said

    def summary(self) -> str:
        """The most that was held, where, and in which phase; empty where nothing was read."""
        if not self.readings:
            return ""
        said = []
        for kind in self._kinds():
            peaks = [getattr(one, f"{kind}_peak") for one in self.readings]
            rank = peaks.index(max(peaks))
            limit = getattr(self.readings[rank], f"{kind}_limit")
            said.append(f"{size(peaks[rank])} of {size(limit)} on the {kind} (rank {rank})")
        phases = self._by_phase[rank]  # of the device where there is one
        most = max(phases, key=phases.__getitem__)
        differ = phases[most] > _WORTH_A_WORD * min(filter(None, phases.values()), default=0.0) > 0
        where = f"; most of it in {most}, {size(phases[most])}" if differ else ""
        return f"memory at its peak: {', '.join(said)}{where}."

    def _kinds(self) -> list[str]:
        return ["host", "device"] if self.readings and self.readings[0].device_limit else ["host"]


def resident_bytes() -> float:
    """What this process holds of the host's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))


def peak_bytes() -> float:
    """The most that this process ever held; a fork begins with what it shares with its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024
    return 0.0
