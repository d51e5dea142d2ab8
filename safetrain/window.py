"""One window: N micro-batches, one reduction, one vote, one optimizer step.

The ranks' shares are collected in one of two orders; what follows is decided from the tally alone, so that all ranks
decide alike.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from safetrain.activity import ACTIVITY
from safetrain.ballot import Outcome, Tally, Vote
from safetrain.build import check_optimizers
from safetrain.contain import Share
from safetrain.data import check_same_order
from safetrain.errors import (
    CommunicationError,
    PeerFailed,
    RankFailed,
    RanksDiffer,
    UsageError,
    together,
)
from safetrain.not_finite import not_finite
from safetrain.opening import Opening
from safetrain.parts import Parts
from safetrain.precision import Applied, Clip
from safetrain.train_then_vote import TrainThenVote
from safetrain.vote_then_train import VoteThenTrain

logger = logging.getLogger("safetrain")


class WindowResult(NamedTuple):
    """What one window did; all but ``losses`` is the same on every rank."""

    applied: bool
    dropped: str  # why not applied, for people; empty where there simply was no data
    dropped_late: str  # why the window before was not applied after all
    weight: int  # of all ranks
    grad_norm: torch.Tensor | None  # None: not known, the window was dropped before
    epoch_ends: bool
    stop: bool
    save: bool  # some rank wants a checkpoint
    leave: bool  # some rank was told to leave
    same_log_keys: bool
    losses: Sequence[tuple[str, torch.Tensor, int]]  # of this rank: (name, detached mean, weight)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A window whose optimizer step is under way."""

    step: int
    share: Share
    phase: str | None
    applied: Applied


class Window:
    """Runs windows.

    Attributes:
        applied_steps: real optimizer steps so far.
        order: of training and voting.
        inside_epoch: an epoch has begun, and is not done with.
        epoch_over: of that epoch no window is left, only its validation.
        opening: what a window, or a validation, under way must leave no trace in.
        on_first_batch: called once, on all ranks, with the seconds that the first batch took; it is yet to be taken.
    """

    def __init__(self, parts: Parts, schedulers: Mapping[str, LRScheduler], clip: Clip) -> None:
        self._parts, self._schedulers, self._clip = parts, schedulers, clip
        self.order = VoteThenTrain(parts) if parts.reduction.votes_first else TrainThenVote(parts)
        self._consecutive: Counter[str] = Counter()
        self._open: Stepped | None = None
        self._under_way: Literal["", "before its step", "its step"] = ""
        self.opening = Opening(parts.feed, parts.user.log, parts.comm.device)
        self.applied_steps = 0
        self.inside_epoch = self.epoch_over = False
        self.on_first_batch: Callable[[float], None] | None = None

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Start the data of an epoch, or go on where a checkpoint was; new modules in the model are noticed here."""
        self.inside_epoch = True
        ACTIVITY.epoch = epoch
        ACTIVITY.enter("data")
        began_at = monotonic()
        self._parts.feed.begin_epoch(epoch)
        seconds = monotonic() - began_at
        check_same_order(self._parts.feed, self._parts.comm, epoch)
        on_first_batch, self.on_first_batch = self.on_first_batch, None
        if on_first_batch is not None:
            on_first_batch(seconds)
        self._follow_layout(step, walk=True)

    def end_epoch(self) -> None:
        """Nothing of the epoch is left to do."""
        self.inside_epoch = self.epoch_over = False

    def state_dict(self) -> dict[str, Any]:
        facts = {"applied_steps": self.applied_steps, "inside_epoch": self.inside_epoch, "epoch_over": self.epoch_over}
        return {**facts, "dropped_in_a_row": dict(self._consecutive)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.applied_steps, self.inside_epoch = state["applied_steps"], state["inside_epoch"]
        self.epoch_over = state["epoch_over"]
        self._consecutive = Counter(state["dropped_in_a_row"])

    def finish(self, step: int) -> None:
        """After the last step: no vote will tell any more whether all ranks took it."""
        ACTIVITY.enter("vote")
        comm = self._parts.comm
        steps, shares = zip(*comm.gather((self.applied_steps, comm.collectives.close())), strict=True)
        if sum(shares) % (1 << 32):
            self._parts.compare_collectives(step)
        if len(set(steps)) > 1:
            raise self._steps_differ(step)

    def run(self, step: int, phase: str | None = None) -> WindowResult:
        """Run window number ``step``; with a ``phase``, only the optimizer of that name learns.

        Raises:
            RankFailed, PeerFailed: user code failed on this rank, on another.
            TrainingStopped: a policy's limit is reached.
            RanksDiffer: they issued different collectives.
            CommunicationError: they are not at the same step.
        """
        ACTIVITY.step = step
        self.opening.note()
        self._under_way = "before its step"
        self._follow_layout(step)
        share = Share(census=self._parts.census.tell)
        tally = self.order.collect(step, self.applied_steps, share, phase)
        self._check_together(step, share, tally)
        ACTIVITY.enter("optimizer")
        dropped_late = self.settle()
        dropped, grad_norm = self._apply_or_drop(step, share, tally, phase)
        self._under_way, self.epoch_over = "", self._parts.policies.uneven.ends_epoch(tally)
        self.opening.forget()
        return WindowResult(
            applied=dropped is None,
            dropped=dropped or "",
            dropped_late=dropped_late or "",
            weight=tally.weight if dropped is None else 0,
            grad_norm=grad_norm,
            epoch_ends=self.epoch_over,
            stop=tally.stop > 0,
            save=tally.save > 0,
            leave=tally.leave > 0,
            same_log_keys=tally.same_log_keys,
            losses=share.losses,
        )

    def _apply_or_drop(
        self, step: int, share: Share, tally: Tally, phase: str | None
    ) -> tuple[str | None, torch.Tensor | None]:
        """(None, gradient norm) after a real optimizer step; else why there was none."""
        parts = self._parts
        if share.outcome in (Outcome.SKIP, Outcome.OUT_OF_MEMORY):
            logger.warning("rank %d, step %d: %s", parts.comm.rank, step, share.reason)
        reason = parts.policies.drops(tally)
        if reason:
            parts.reduction.discard()
            return self._count_drop(step, reason, tally.troubled_rank), None
        if tally.weight == 0:
            return "", None
        parts.reduction.drop_unused_everywhere(tally)
        if share.left_out:  # what was left out must not stay in a running mean either
            parts.reduction.restore_buffers()
        optimizers = list(parts.optimizers.values()) if phase is None else [parts.optimizers[phase]]
        factor = parts.comm.world_size * parts.nominal_weight * parts.accumulate / tally.weight
        self._under_way = "its step"
        applied = parts.precision.step(optimizers, self._clip, factor, parts.reduction.total_norm)
        self._open = Stepped(step, share, phase, applied)
        if parts.precision.skips_on_device(optimizers):
            parts.reduction.restore_buffers_unless(applied.finite_on_device)
            return None, applied.grad_norm
        if applied.finite:
            return self.settle(), applied.grad_norm
        self._under_way = "before its step"
        try:  # its gradients tell where it comes from, if that is asked for
            return self.settle(), applied.grad_norm
        finally:
            parts.reduction.discard()

    def go_back(self) -> bool:
        """Undo, for the state only, what a window or a validation that failed has done to this rank so far; False: it
        was in the middle of its optimizer step."""
        if self._under_way == "its step":
            return False
        if self._under_way:
            self._parts.reduction.restore_buffers()
        self.opening.go_back()
        return True

    def settle(self) -> str | None:
        """Read how the last optimizer step went and do what follows from it; on a GPU that is a window later.

        None after a real step, or where nothing is open; else why there was none.
        """
        if self._open is None:
            return None
        stepped, self._open = self._open, None
        if not stepped.applied.finite:
            for name, value, _ in stepped.share.losses:
                if not math.isfinite(float(value)):
                    logger.warning(
                        "rank %d, step %d: %s is %s", self._parts.comm.rank, stepped.step, name, float(value)
                    )
            counts = not stepped.applied.scale_coming_down
            return self._count_drop(stepped.step, "non-finite gradient", None, counts=counts)
        for name, scheduler in self._schedulers.items():
            if stepped.phase is None or name == stepped.phase:
                scheduler.step()
        self.applied_steps += 1
        self._consecutive.clear()
        return None

    def _count_drop(self, step: int, reason: str, troubled_rank: int | None, *, counts: bool = True) -> str:
        """The reason with the rank in it; all ranks stop where the policy's limit is passed."""
        who = "" if troubled_rank is None else f" (rank {troubled_rank})"
        self._consecutive[reason] += counts
        if (windows := self._consecutive[reason]) > self._parts.policies.limit(reason):
            self._consecutive[reason] -= 1  # a run that goes on from this step counts this window again
            model, census = self._parts.reduction.model, self._parts.census
            where = not_finite(model) if troubled_rank is None else census.where(reason, troubled_rank)
            raise together(self._parts.policies.stopped(step, reason, who, windows, where))
        return f"{reason}{who}"

    def _check_together(self, step: int, share: Share, tally: Tally) -> None:
        """All ranks are at the same step, took the same optimizer steps, and none has failed."""
        side_by_side = tally.same_step and tally.same_applied_steps
        try:
            if tally.fell_apart:
                self._leave(step, share)
            if not tally.same_collectives:
                self._parts.compare_collectives(step)
        except (RankFailed, PeerFailed, RanksDiffer) as error:
            error.together = side_by_side
            raise
        if not tally.same_step:
            raise CommunicationError(
                f"rank {self._parts.comm.rank} is at step {step}, and the other ranks are not all there"
            )
        if not tally.same_applied_steps:
            raise self._steps_differ(step)

    def _steps_differ(self, step: int) -> CommunicationError:
        return CommunicationError(
            f"step {step}: rank {self._parts.comm.rank} has taken {self.applied_steps} optimizer steps, and the ranks "
            "differ in that. Gradients were changed after their reduction, on some ranks only (an optimizer or "
            "parameter hook?)."
        )

    def _leave(self, step: int, share: Share) -> NoReturn:
        """All ranks stop at this step: the culprit with its own exception, the others with the culprit's words."""
        parts = self._parts
        parts.reduction.restore_buffers()  # the state that is left is that of the last whole step
        if share.outcome is Outcome.FAILED:
            raise parts.failed(step, share.reason, share.phase, share.work) from share.error
        reasons = {
            rank: parts.comm.read(f"failure/{step}/{rank}") or parts.comm.read(f"layout/{step}/{rank}")
            for rank in range(parts.comm.world_size)
        }
        failed = {rank: reason for rank, reason in reasons.items() if reason is not None}
        raise PeerFailed.at(step, failed)

    def _follow_layout(self, step: int, *, walk: bool = False) -> None:
        """Where parameters were frozen, unfrozen or replaced, an empty window says so, and all ranks wrap anew."""
        parts, share = self._parts, Share()
        try:
            change = parts.reduction.layout_change(walk=walk)
        except UsageError as error:
            change = str(error)
            share.note(Outcome.FAILED, change, "training_step", error)
            parts.reduction.convert_back()
        if change is None:
            return
        reason = change if share.error else f"{change}, but not on all ranks: do it on all of them before the same step"
        parts.comm.post(f"layout/{step}/{parts.comm.rank}", reason)
        tally = parts.reduction.announce_layout(
            Vote(step=step, applied_steps=self.applied_steps, outcome=share.outcome, relayout=True), parts.accumulate
        )
        if tally.relayout < tally.world_size:
            share.note(Outcome.FAILED, reason, "training_step")
        self._check_together(step, share, tally)
        check_optimizers(parts.optimizers, parts.reduction.model)
        parts.reduction.rewrap()
