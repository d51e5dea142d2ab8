"""Where the time of a step goes: what a rank spends in each phase of the loop, and in words what holds a run back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from safetrain.phase_clock import PhaseClock
from safetrain.stragglers import Straggler, StragglerWatch

PARTS = {
    "data": "data",
    "sync_buffers": "communication",
    "training_step": "forward",
    "backward": "backward",
    "vote": "communication",
    "optimizer": "optimizer",
    "log": "logging",
    "save_checkpoint": "checkpoints",
}
"""Phases of a step, and what they are called. Communication: what backward did not hide, and the wait for others."""
OWN_WORK = ("data", "forward", "backward")
"""What a rank does by itself: the wait for the others makes all ranks' steps equally long, so it must not count."""

_LEAST_STEPS = 10  # in one step any rank may be late
_WORTH_ADVICE_S = 10.0  # what a shorter run spends its time on says little about a longer one


class StepClock:
    """This rank's seconds in each part of a step, lap by lap."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._before = self._now()

    def lap(self) -> dict[str, float]:
        """Seconds in each part since the last lap."""
        now = self._now()
        spent = {part: now[part] - self._before[part] for part in now}
        self._before = now
        return spent

    def _now(self) -> dict[str, float]:
        by_phase = self._clock.read()
        spent = dict.fromkeys(PARTS.values(), 0.0)
        for phase, part in PARTS.items():
            spent[part] += by_phase.get(phase, 0.0)
        return spent


class TimeTable:
    """All ranks' seconds a step, put together at each logging interval; the same on every rank.

    Attributes:
        mean_s: of the last interval, over the ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._steps = 0
        self._watch = StragglerWatch()
        self._work: list[dict[str, float]] = []  # by rank; seconds in the steps of which nobody has been told yet
        self._untold_steps = 0
        self._total_s = dict.fromkeys(PARTS.values(), 0.0)
        self.mean_s: dict[str, float] = {}

    def row(self, spent_s: Mapping[str, float]) -> list[float]:
        """What this rank adds to a sum over ranks: all its parts, and its own work in places that are its alone."""
        own = [0.0] * (len(OWN_WORK) * self._world_size)
        own[len(OWN_WORK) * self._rank : len(OWN_WORK) * (self._rank + 1)] = [spent_s[part] for part in OWN_WORK]
        return [*(spent_s[part] for part in self._total_s), *own]

    def add(self, summed: Sequence[float], steps: int) -> None:
        """The sum of all ranks' rows, of an interval of ``steps``."""
        parts, own = summed[: len(self._total_s)], summed[len(self._total_s) :]
        self.mean_s = {part: total / self._world_size for part, total in zip(self._total_s, parts, strict=True)}
        work = [dict(zip(OWN_WORK, own[at:], strict=False)) for at in range(0, len(own), len(OWN_WORK))]
        untold = self._work or [dict.fromkeys(OWN_WORK, 0.0) for _ in work]
        self._work = [
            {part: before[part] + steps * now[part] for part in OWN_WORK}
            for before, now in zip(untold, work, strict=True)
        ]
        self._untold_steps += steps
        for part, seconds in self.mean_s.items():
            self._total_s[part] += steps * seconds
        self._steps += steps

    def straggler(self) -> Straggler | None:
        """To be asked once an interval: a rank to name now. Of fewer than 10 steps it is not asked, but of the next
        ones together with them."""
        if self._untold_steps < _LEAST_STEPS:
            return None
        work = [{part: seconds / self._untold_steps for part, seconds in own.items()} for own in self._work]
        steps, self._work, self._untold_steps = self._untold_steps, [], 0
        return self._watch.judge(work, steps)

    def summary(self, machine: Machine) -> str:
        """How long a step took, where the time went, and what to change; empty where nothing was measured."""
        if not self._steps:
            return ""
        step_s = math.fsum(self._total_s.values()) / self._steps
        said = f"a step took {1000 * step_s:.3g} ms: {shares_in_words(self._total_s)}."
        if step_s * self._steps < _WORTH_ADVICE_S:
            return said
        return f"{said} {advice(self._total_s, machine)}".rstrip()


class Machine(NamedTuple):
    """What advice depends on."""

    loader_processes: int  # of a rank
    cores_per_rank: int
    ranks: int = 2
    loader_key: str = "loader.num_workers"


def shares_in_words(seconds: Mapping[str, float]) -> str:
    """Such as ``backward 41 %, data 30 %, forward 29 %``; what is under 1 % is left out."""
    total = math.fsum(seconds.values())
    shares = sorted(((value / total, part) for part, value in seconds.items()), reverse=True) if total else []
    return ", ".join(f"{part} {_percent(share)}" for share, part in shares if share >= 0.01)


def advice(seconds: Mapping[str, float], machine: Machine) -> str:
    """One sentence on what to change, with the reason; empty where nothing stands out."""
    total = math.fsum(seconds.values())
    if total == 0:
        return ""
    share = {part: value / total for part, value in seconds.items()}
    # what can be had by a key of the config alone is worth a word sooner
    least = {"data": 0.2, "communication": 0.2, "logging": 0.05, "checkpoints": 0.05}
    wasted = {part: share[part] for part, limit in least.items() if share[part] >= limit}
    if machine.ranks == 1:
        wasted.pop("communication", None)
    if not wasted:
        return ""
    most = max(wasted, key=wasted.__getitem__)
    said = {
        "data": f"waits for data: {_more_loaders(share['data'], machine)}",
        "communication": (
            "waits for other ranks, and for gradients that backward did not hide: more samples a step "
            "(loader.batch_size, loop.accumulate) make that rarer, strategy.comm_hook=fp16 halves what is sent."
        ),
        "logging": "goes into logging: raise loop.log_every_steps.",
        "checkpoints": (
            "goes into checkpoints: save less often (checkpoint.every_steps, every_minutes, every_epochs)."
        ),
    }
    return f"{_percent(wasted[most])} of the time {said[most]}"


def _more_loaders(data_share: float, machine: Machine) -> str:
    now, key = machine.loader_processes, machine.loader_key
    # one batch takes (processes, or 1) x what is waited for and what is hidden; the rest of a step has to cover it
    wanted = max(now + 1, math.ceil(max(now, 1) / (1 - data_share))) if data_share < 1 else now + 1
    possible = max(0, machine.cores_per_rank - 1)
    if now < possible:
        return f"{key}={min(wanted, possible)} (now {now}) lets batches be read while the model computes."
    cores = "1 core" if machine.cores_per_rank == 1 else f"{machine.cores_per_rank} cores"
    more = f", or raise {key} (now {now}) if reading waits more than it computes"
    return f"a rank has {cores} here. Make a sample cheaper to read (smaller files, less work in __getitem__){more}."


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
