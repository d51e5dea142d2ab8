"""Where the time of a step goes: what a rank spends in each phase of the loop, and in words what holds a run back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from safetrain.activity import Activity

PARTS = {
    "data": "data",
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

_WORTH_A_WORD = 0.2  # of a step
_WORTH_A_WORD_IF_AVOIDABLE = 0.05


class StepClock:
    """This rank's seconds in each part of a step, lap by lap. Reads what the loop has noted anyway (activity.py)."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._before = self._now()

    def lap(self) -> dict[str, float]:
        """Seconds in each part since the last lap."""
        now = self._now()
        spent = {part: now[part] - self._before[part] for part in now}
        self._before = now
        return spent

    def _now(self) -> dict[str, float]:
        spent = self._activity.spent
        return {part: spent.get(phase, 0.0) for phase, part in PARTS.items()}


class Machine(NamedTuple):
    """What advice depends on."""

    loader_processes: int  # of a rank
    cores_per_rank: int


def shares_in_words(seconds: Mapping[str, float]) -> str:
    """Such as ``backward 41 %, data 30 %, forward 29 %``; what is under 1 % is left out."""
    total = math.fsum(seconds.values())
    shares = sorted(((value / total, part) for part, value in seconds.items()), reverse=True) if total else []
    return ", ".join(f"{part} {share:.0%}".replace("%", " %") for share, part in shares if share >= 0.01)


def advice(seconds: Mapping[str, float], machine: Machine) -> str:
    """One sentence on what to change, with the reason; empty where nothing stands out."""
    total = math.fsum(seconds.values())
    if total == 0:
        return ""
    share = {part: value / total for part, value in seconds.items()}
    if share["data"] >= _WORTH_A_WORD:
        return f"{_percent(share['data'])} of the time waits for data: {_more_loaders(share['data'], machine)}"
    if share["logging"] >= _WORTH_A_WORD_IF_AVOIDABLE:
        return f"{_percent(share['logging'])} of the time goes into logging: raise loop.log_every_steps."
    if share["checkpoints"] >= _WORTH_A_WORD_IF_AVOIDABLE:
        return (
            f"{_percent(share['checkpoints'])} of the time goes into checkpoints: save less often "
            "(checkpoint.every_steps, every_minutes, every_epochs)."
        )
    if share["communication"] >= _WORTH_A_WORD:
        return (
            f"{_percent(share['communication'])} of the time waits for other ranks, and for gradients that backward did "
            "not hide: more samples a step (loader.batch_size, loop.accumulate) make that rarer, "
            "strategy.comm_hook=fp16 halves what is sent."
        )
    return ""


def _more_loaders(data_share: float, machine: Machine) -> str:
    now = machine.loader_processes
    # one batch takes (processes, or 1) x what is waited for and what is hidden; the rest of a step has to cover it
    wanted = max(now + 1, math.ceil(max(now, 1) / (1 - data_share))) if data_share < 1 else now + 1
    possible = max(0, machine.cores_per_rank - 1)
    if now >= possible:
        return (
            f"loader.num_workers={now} already takes the {machine.cores_per_rank} core(s) that a rank has here, so "
            "make a sample cheaper to read (smaller files, less work in __getitem__)."
        )
    return f"loader.num_workers={min(wanted, possible)} (now {now}) lets batches be read while the model computes."


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
