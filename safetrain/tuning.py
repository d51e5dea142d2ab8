"""Which way to reduce gradients is fastest for a job: each is tried on the job itself, in turns, for a few steps.

A turn is a run of its own of the user's trainer, so a way that is refused (a static graph under a comm hook, say) is
refused as it would be in the job. The ways take turns, so that what disturbs the machine disturbs all of them, and are
compared round by round.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from safetrain.buckets import bucket_bytes
from safetrain.config import Checkpoint
from safetrain.errors import ConfigError, UsageError
from safetrain.medians import interval_of_median
from safetrain.observer import Event, RunInfo
from safetrain.overlap import Overlap, TimedDDP, TimedReduction, in_words
from safetrain.strategy import DDPStrategy
from safetrain.trainer import Trainer
from safetrain.tune_config import Tune

AS_CONFIGURED = "as configured"
_CAPS_MB = (1.0, 5.0, 25.0, 100.0)
_NEVER = 1 << 60


@dataclass
class Tried:
    """What came of one way.

    Attributes:
        keys: the line of config that chooses it; empty: as configured.
        step_s: seconds a step, one entry a round, the mean over the ranks.
        ratios: the same over those as configured, in the same round.
        refused: why it can't be used.
    """

    keys: str
    step_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    refused: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_faster(self) -> bool:
        """Whether that is more than chance."""
        return bool(self.ratios) and interval_of_median(self.ratios)[1] < 1


class StepTimes:
    """An observer that notes when steps end."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def start(self, run: RunInfo) -> None:
        self.at.clear()

    def step(self, step: int, epoch: int) -> None:
        self.at.append(time.perf_counter())

    def event(self, event: Event) -> None: ...

    def close(self) -> None: ...


def ways(strategy: DDPStrategy, parameter_bytes: Sequence[int], device: str) -> dict[str, DDPStrategy]:
    """What differs from ``strategy`` in one key and would do something: by the line of config that chooses it.

    ``parameter_bytes``: in the order in which gradients are expected. A bucket size counts if the buckets differ.
    """
    found: dict[str, DDPStrategy] = {}
    seen = {tuple(bucket_bytes(parameter_bytes, strategy.bucket_cap_mb))}
    for cap_mb in (None, *_CAPS_MB):
        buckets = tuple(bucket_bytes(parameter_bytes, cap_mb))
        if buckets not in seen:
            seen.add(buckets)
            value = "null" if cap_mb is None else f"{cap_mb:g}"
            found[f"strategy.bucket_cap_mb={value}"] = replace(strategy, bucket_cap_mb=cap_mb)
    views = not strategy.gradient_as_bucket_view
    found[f"strategy.gradient_as_bucket_view={str(views).lower()}"] = replace(strategy, gradient_as_bucket_view=views)
    if not strategy.static_graph:
        found["strategy.static_graph=true"] = replace(strategy, static_graph=True)
    if strategy.comm_hook is None:
        for hook in ("fp16",) if device == "cpu" else ("fp16", "bf16"):
            found[f"strategy.comm_hook={hook}"] = replace(strategy, comm_hook=hook)
    return found


def together(strategy: DDPStrategy, chosen: Sequence[DDPStrategy]) -> DDPStrategy:
    """``strategy`` with every key changed as one of ``chosen`` changes it."""
    changed: dict[str, Any] = {}
    for one in chosen:
        changed |= {name: value for name, value in vars(one).items() if value != getattr(strategy, name)}
    return replace(strategy, **changed)


@dataclass(frozen=True)
class Tuned:
    """What was found.

    Attributes:
        tried: every way once; the first is the configured one.
        again: what was faster then, all of it together, in rounds of its own: of several ways one is the fastest by
            chance alone. None: nothing was faster.
        overlaps: what backward hides of the all-reduces, on this rank, as configured and in that way.
    """

    tried: Sequence[Tried]
    again: Tried | None
    overlaps: Mapping[str, Overlap]


def tune(trainer: Trainer, options: Tune) -> Tuned:
    """Try them all. The same on every rank.

    Raises:
        ConfigError: the strategy is not DDP's.
    """
    configured = trainer.strategy
    if type(configured) is not DDPStrategy:
        raise ConfigError(
            f"safetrain.tune tries the options of strategy=ddp, and the job has {type(configured).__name__}"
        )
    turns = Turns(trainer, options)
    turns.take(configured)  # finds files and memory: not kept
    parameter_bytes = [p.nbytes for p in reversed(list(trainer.model.parameters())) if p.requires_grad]
    singles = ways(configured, parameter_bytes, trainer.comm.device.type)
    tried = turns.rounds(configured, singles)
    looked_at = {"": configured}
    again: Tried | None = None
    if promising := best_of_each_key([one for one in tried if one.is_faster]):
        keys = " ".join(promising)
        looked_at[keys] = together(configured, [singles[each] for each in promising])
        _, again = turns.rounds(configured, {keys: looked_at[keys]})
    return Tuned(tried, again, {each: turns.overlap(strategy) for each, strategy in looked_at.items()})


def best_of_each_key(tried: Sequence[Tried]) -> list[str]:
    """Of several values of one key the fastest: their lines of config."""
    best: dict[str, Tried] = {}
    for one in sorted(tried, key=lambda one: one.ratio):
        best.setdefault(one.keys.partition("=")[0], one)
    return [one.keys for one in best.values()]


class Turns:
    """Runs of a trainer, each of a few steps and for nothing else."""

    def __init__(self, trainer: Trainer, options: Tune) -> None:
        self._trainer, self._options, self._times = trainer, options, StepTimes()
        steps = options.warmup_steps + options.steps
        trainer.loop = replace(
            trainer.loop, max_steps=steps, epochs=_NEVER, validate_every_epochs=_NEVER, log_every_steps=_NEVER
        )
        trainer.observers = (self._times,)
        trainer.checkpoint = Checkpoint(every_minutes=None, every_epochs=None, at_end=False, at_failure_s=0)
        trainer.preflight = replace(trainer.preflight, enabled=False)
        trainer.resume = "none"
        # not once a turn: it may read files for minutes
        trainer.build_train_data = functools.cache(trainer.build_train_data)  # type: ignore[method-assign]
        trainer.build_val_data = lambda: None  # type: ignore[method-assign]

    def rounds(self, base: DDPStrategy, others: Mapping[str, DDPStrategy]) -> list[Tried]:
        """All of them, ``base`` first in each round; a way that is refused is not tried again."""
        tried = {keys: Tried(keys) for keys in ("", *others)}
        for _ in tqdm(range(self._options.rounds), f"{len(tried)} ways", disable=self._trainer.comm.rank > 0):
            base_s = self.take(base)
            for keys, one in tried.items():
                if one.refused:
                    continue
                try:
                    step_s = self.take(others[keys]) if keys else base_s
                except UsageError as error:  # found before the first step, on all ranks
                    one.refused = str(error)
                else:
                    one.step_s.append(step_s)
                    one.ratios.append(step_s / base_s)
        return list(tried.values())

    def take(self, strategy: DDPStrategy) -> float:
        """Seconds a step, the mean over the ranks."""
        self._trainer.strategy = strategy
        self._trainer.fit()
        at = self._times.at[self._options.warmup_steps - 1 :]
        step_s = (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else math.nan
        return statistics.mean(self._trainer.comm.gather(step_s))

    def overlap(self, strategy: DDPStrategy) -> Overlap:
        """Of one more turn."""
        timed = TimedDDP(**{**vars(strategy), "comm_hook": None, "static_graph": False})
        self.take(timed)
        reduction = self._trainer._run.reduction
        assert isinstance(reduction, TimedReduction)
        return reduction.times.overlap(self._options.warmup_steps)


def report(found: Tuned) -> str:
    """The whole of what the command prints."""
    looked_at = [
        f"{keys or AS_CONFIGURED.capitalize()}, on rank 0:\n{in_words(seen)}" for keys, seen in found.overlaps.items()
    ]
    return "\n\n".join([table(found), *looked_at])


def table(found: Tuned) -> str:
    """A line for each way, and the best line of config."""
    names = [one.keys or AS_CONFIGURED for one in found.tried]
    width = max(len(name) for name in names)
    lines = [f"{'':<{width}}  ms a step  against as configured"]
    for name, one in zip(names, found.tried, strict=True):
        if one.refused:
            lines.append(f"{name:<{width}}  can't be used: {one.refused}")
        else:
            lines.append(f"{name:<{width}}  {1000 * statistics.median(one.step_s):9.2f}  {_compared(one)}")
    return "\n".join([*lines, "", _best(found.again)])


def _compared(one: Tried) -> str:
    if not one.keys:
        return "1"
    low, high = interval_of_median(one.ratios)
    return f"{one.ratio:.3f} [{low:.3f} to {high:.3f}]"


def _best(again: Tried | None) -> str:
    if again is None:
        return "Nothing is faster than as configured, beyond what chance may do in so few steps: leave it."
    if again.refused:
        return f"Together, {again.keys} can't be used: {again.refused}"
    if not again.is_faster:
        return f"{again.keys} seemed faster, and tried again it was not ({_compared(again)}): leave it."
    by = f"{1 - again.ratio:.0%}".replace("%", " %")
    rounded = "\nGradients are then rounded on the wire: look whether it still learns as well."
    return f"Faster by {by}, tried again ({_compared(again)}):  {again.keys}" + rounded * ("comm_hook" in again.keys)
