"""How much of the all-reduces backward hides, bucket by bucket.

A bucket is reduced as soon as its last gradient is there, while backward goes on for the others. What still runs when
this rank's backward has nothing more to compute is exposed: the step waits for it. The times are taken in a
communication hook round DDP's own all-reduce, so this is for trying out (safetrain.tune), not for every run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from safetrain.ballot import Tally, Vote
from safetrain.comm import Comm
from safetrain.reduction import DDPReduction
from safetrain.strategy import DDPStrategy

_MIB = 1 << 20


class Moment:
    """A point of time: of this process' clock, or of the device's stream; there it is read when all is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._at = time.perf_counter()

    def until(self, later: Moment) -> float:
        """Seconds; below 0 where ``later`` came before."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        self._event.synchronize()
        return self._event.elapsed_time(later._event) / 1000


class Reduced(NamedTuple):
    """One all-reduce of one bucket."""

    bucket: int
    size_bytes: int
    began: Moment
    ended: Moment


@dataclass(frozen=True)
class BucketOverlap:
    """A bucket's all-reduces, on this rank: medians over steps, in seconds."""

    bucket: int
    size_bytes: int
    reduce_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """The share of its time during which backward still computed."""
        return 1 - self.exposed_s / self.reduce_s if self.reduce_s else 1.0


@dataclass(frozen=True)
class Overlap:
    """What was seen on one rank.

    Attributes:
        buckets: in the order in which they are reduced.
        exposed_s: seconds a step that the rank waits for all-reduces after its backward (median).
    """

    buckets: Sequence[BucketOverlap]
    exposed_s: float


class BucketTimes:
    """Takes the times of a few steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[Reduced] = []
        self._steps: list[tuple[Moment, list[Reduced]]] = []

    def hook(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """DDP's communication hook: ``reduce``, which is one, between two moments."""

        def timed(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations but its own
            began, index, size = self.now(), bucket.index(), bucket.buffer().nbytes

            def done(future: Any) -> torch.Tensor:
                self._open.append(Reduced(index, size, began, self.now()))
                return future.value()

            return reduce(state, bucket).then(done)

        return timed

    def now(self) -> Moment:
        return Moment(self._device)

    def step_done(self, backward_ended: Moment) -> None:
        """A reduction is complete; ``backward_ended``: the user's part of it had nothing left to compute."""
        self._steps.append((backward_ended, self._open))
        self._open = []

    def overlap(self, first: int) -> Overlap:
        """Of the steps from ``first`` on; buckets are laid out anew after the first one."""
        times: dict[int, list[tuple[Reduced, float, float]]] = {}
        waits: list[float] = []
        for backward_ended, reduced in self._steps[first:]:
            after_s = {one.bucket: max(0.0, backward_ended.until(one.ended)) for one in reduced}
            waits.append(max(after_s.values(), default=0.0))
            for one in reduced:
                whole_s = one.began.until(one.ended)
                times.setdefault(one.bucket, []).append((one, whole_s, min(whole_s, after_s[one.bucket])))
        buckets = [
            BucketOverlap(
                bucket,
                all_of[-1][0].size_bytes,
                statistics.median(whole_s for _, whole_s, _ in all_of),
                statistics.median(exposed_s for _, _, exposed_s in all_of),
            )
            for bucket, all_of in sorted(times.items())
        ]
        return Overlap(buckets, statistics.median(waits) if waits else 0.0)


class TimedReduction(DDPReduction):
    """DDP's, with a look at each bucket."""

    def __init__(self, model: nn.Module, comm: Comm, strategy: DDPStrategy) -> None:
        super().__init__(model, comm, strategy)
        self.times = BucketTimes(comm.device)
        self.time_buckets(self.times.hook)

    def complete(self, vote: Vote) -> Tally:
        backward_ended = self.times.now()
        tally = super().complete(vote)
        self.times.step_done(backward_ended)
        return tally

    def finish_voted(self, tally: Tally) -> Tally:
        backward_ended = self.times.now()
        finished = super().finish_voted(tally)
        self.times.step_done(backward_ended)
        return finished


class TimedDDP(DDPStrategy):
    """The same choices, and the times of buckets are taken. Not with a static graph, which DDP ends inside the user's
    backward, and not with a hook that compresses."""

    def reduce(self, model: nn.Module, comm: Comm) -> TimedReduction:
        return TimedReduction(model, comm, self)


def in_words(overlap: Overlap) -> str:
    """A line for each bucket, in the order in which they are reduced, and what they come to."""
    lines = ["bucket      MiB  all-reduce ms  exposed ms   hidden"]
    for one in overlap.buckets:
        times = f"{1000 * one.reduce_s:13.2f}  {1000 * one.exposed_s:10.2f}"
        lines.append(f"{one.bucket:>6} {one.size_bytes / _MIB:8.2f}  {times}  {100 * one.hidden:5.0f} %")
    whole_s = sum(one.reduce_s for one in overlap.buckets)
    hidden_s = whole_s - sum(one.exposed_s for one in overlap.buckets)
    share = f"{100 * hidden_s / whole_s:.0f} %" if whole_s else "all"
    waits = f"a step waits {1000 * overlap.exposed_s:.2f} ms for them"
    return "\n".join([*lines, f"Backward hides {share} of the all-reduces' time; {waits}."])
