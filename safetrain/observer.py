"""What a run tells, and to whom: the records that the loop hands out, and the protocol of those who take them.

An observer exists on every rank and decides in ``start`` whether its rank writes (as a rule rank 0). It is told things,
it is never asked: no observer takes part in a collective or changes what the loop does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class RunInfo:
    """A run as it starts; the same on every rank but for ``rank``."""

    rank: int
    world_size: int
    run_dir: Path | None  # None: nothing is written to disk
    name: str
    epochs: int
    steps_per_epoch: int | None  # None: the data set has no length
    max_steps: int | None
    start_step: int
    config_text: str  # the resolved config as YAML
    device: str
    parameters: int
    start_events: int = 0  # told up to start_step, by earlier processes of this run

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, if it ends by itself; None if only the data knows."""
        if self.steps_per_epoch is None:
            return self.max_steps
        whole = self.epochs * self.steps_per_epoch
        return whole if self.max_steps is None else min(whole, self.max_steps)


OF_THE_MACHINE = ("timing", "memory")
"""Kinds of events that depend on the machine: a run that goes on in another process has others."""


@dataclass(frozen=True)
class Event:
    """Something worth telling: metrics such as ``train/loss`` or ``val/accuracy``, or a text without the step.

    The last one of a run says how it ended: ``end``, well; ``failed``; ``preempted``, to go on later. A process that is
    killed, or ended by a watchdog, tells none.
    """

    kind: Literal[
        "train",
        "validation",
        "skip",
        "warning",
        "note",
        "checkpoint",
        "timing",
        "memory",
        "end",
        "failed",
        "preempted",
    ]
    step: int
    epoch: int  # from 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


class Observer(Protocol):
    """Is told what happens in a run. The calls come from the training loop: they must be cheap and must not raise."""

    def start(self, run: RunInfo) -> None:
        """Training is about to start."""

    def step(self, step: int, epoch: int) -> None:
        """``step`` optimizer steps are done; called after each, so it may cost about a microsecond."""

    def event(self, event: Event) -> None:
        """Something worth telling happened."""

    def close(self) -> None:
        """The run is over, well or not."""
