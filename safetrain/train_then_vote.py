"""The ordinary order of a window: N contained micro-batches, then the completing backward with the vote in it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from safetrain.activity import ACTIVITY
from safetrain.ballot import Outcome, Tally
from safetrain.contain import OWN_BACKWARD, Loss, Share, place_of, run_training_step
from safetrain.errors import SkipBatch, UsageError
from safetrain.feed import Fetched
from safetrain.parts import Parts
from safetrain.words import names_in_words

logger = logging.getLogger("safetrain")


class TrainThenVote:
    """Whatever user code does in a micro-batch, this rank's share of the reduction is completed and its vote cast."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._warned_unused: set[tuple[str, ...]] = set()

    def state_dict(self) -> None:
        """A rank without data takes part without a batch: there is none to keep for it."""

    def load_state_dicts(self, states: Sequence[Any], world_size: int) -> None:
        """Of a run that voted first."""

    def collect(self, step: int, applied_steps: int, share: Share, phase: str | None) -> Tally:
        """Run the window's micro-batches on this rank and return what all ranks voted."""
        parts = self._parts
        parts.reduction.open_window()
        for index in range(parts.accumulate):
            ACTIVITY.enter("data")
            fetched, losses = parts.feed.take(), []
            share.at_hand = fetched.work
            ACTIVITY.enter("sync_buffers")  # if anything, DDP first broadcasts rank 0's
            parts.reduction.forward(
                lambda: losses.extend(self._forward(fetched, share)),  # noqa: B023  # runs before the next turn
                first=index == 0,
                last=index == parts.accumulate - 1,
            )
            if index == 0 and parts.reduction.holds_gradients():
                parts.reduction.drop_gradients()  # DDP did not see them come: all are still to be completed
                share.note(Outcome.FAILED, OWN_BACKWARD, "training_step", UsageError(OWN_BACKWARD))
                losses.clear()
            ACTIVITY.enter("backward")
            for loss in losses:
                self._backward(loss, share, phase)
        share.at_hand = None
        self._check_unused(step, share, phase)
        vote = parts.vote(step, applied_steps, share)
        ACTIVITY.enter("vote")
        return parts.reduction.complete(vote)

    def _forward(self, fetched: Fetched, share: Share) -> list[Loss]:
        """The loss of one micro-batch, or nothing. Never raises for user code."""
        ACTIVITY.enter("training_step")
        if fetched.error is not None:
            share.catch(fetched.error, "the data set")
            share.left_out = True
            return []
        if fetched.empty or share.spoiled:
            return []
        loss = run_training_step(self._parts.training_step, fetched.batch, fetched.samples, share)
        if loss is None or loss.weight == 0 or (loss.skip and not self._parts.policies.skip.uses_offered_loss):
            share.left_out = True
            return []
        return [loss]

    def _backward(self, loss: Loss, share: Share, phase: str | None) -> None:
        try:
            self._parts.backward(loss, phase)
        except Exception as error:  # noqa: BLE001
            # any user error must become a vote, or the other ranks wait for ever
            if isinstance(error, SkipBatch):  # too late: part of its gradients are in
                error = UsageError(f"SkipBatch was raised during backward at {place_of(error)}: raise it before")
            share.catch(self._parts.reduction.explain(error), "backward")
        else:
            share.add(loss)

    def _check_unused(self, step: int, share: Share, phase: str | None) -> None:
        """Name the parameters that this rank's own batches did not reach."""
        parts = self._parts
        unused = parts.reduction.unused(among=None if phase is None else parts.trained_by(phase))
        if not unused or share.outcome is not Outcome.OK:
            return
        names = names_in_words(unused)
        if parts.policies.unused.stops:
            error = UsageError(
                f"no gradient for {names}. Use them in the loss, freeze them (requires_grad_(False)), or set "
                "policy/unused=zeros"
            )
            share.note(Outcome.FAILED, str(error), "backward", error)
        elif tuple(unused) not in self._warned_unused:
            self._warned_unused.add(tuple(unused))
            logger.warning(
                "rank %d, step %d: no gradient for %s. It counts as zero where another rank has one, and is left alone "
                "where none has. If it is meant to train, use it in the loss; if not, freeze it "
                "(requires_grad_(False)).",
                parts.comm.rank, step, names,
            )  # fmt: skip
