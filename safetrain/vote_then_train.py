"""The order of a window where forward communicates (FSDP, SyncBatchNorm, a static graph): the vote comes first.

Fewer policies hold here. What to leave out is decided by ``accept_batch``; a rank without data runs its last good batch
with weight 0, only to take part; an exception, out of memory or ``None`` in forward or backward ends the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from safetrain.activity import ACTIVITY
from safetrain.ballot import Outcome, Tally
from safetrain.batches import move
from safetrain.contain import OWN_BACKWARD, Loss, Share, place_of
from safetrain.errors import RankFailed, UsageError
from safetrain.feed import Fetched
from safetrain.parts import Parts
from safetrain.work import Work


class VoteThenTrain:
    """Every rank runs every forward of a window that the ranks have agreed to train on."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._spare_batch: Any = None

    def state_dict(self) -> Any:
        """The batch with which a rank without data takes part; one that has data will have another."""
        return self._spare_batch if self._parts.feed.at_end else None

    def load_state_dicts(self, states: Sequence[Any], world_size: int) -> None:
        if len(states) == world_size:
            self._spare_batch = move(states[self._parts.comm.rank], self._parts.comm.device)

    def collect(self, step: int, applied_steps: int, share: Share, phase: str | None) -> Tally:
        """Vote on the window's batches, run them unless the vote drops them, and return the vote."""
        parts = self._parts
        parts.reduction.open_window()
        ACTIVITY.enter("data")
        batches = [parts.feed.take() for _ in range(parts.accumulate)]
        weights = [self._accepted_weight(fetched, share) for fetched in batches]
        share.weight = sum(weights)
        if share.weight == 0 and self._spare_batch is None:
            reason = "no data for its first window: it has nothing to take part in the forward with"
            share.note(Outcome.FAILED, reason, "the data set", UsageError(reason))
        vote = parts.vote(step, applied_steps, share)
        ACTIVITY.enter("vote")
        tally = parts.reduction.vote_first(vote)
        if tally.fell_apart or tally.weight == 0 or parts.policies.drops(tally):
            return tally
        self._spare_batch = next(
            (f.batch for f, weight in zip(batches, weights, strict=True) if weight), self._spare_batch
        )
        for index, (fetched, weight) in enumerate(zip(batches, weights, strict=True)):
            share.at_hand = fetched.work
            self._micro_batch(step, fetched.batch if weight else self._spare_batch, weight, share, phase, index)
        parts.reduction.unused()
        ACTIVITY.enter("vote")
        return parts.reduction.finish_voted(tally)

    def _accepted_weight(self, fetched: Fetched, share: Share) -> int:
        """The weight this rank promises for a micro-batch; 0: none."""
        share.at_hand = fetched.work
        if fetched.empty:
            return 0
        try:
            if fetched.error is not None:
                raise fetched.error
            if self._parts.user.accept_batch(fetched.batch):
                weight = self._parts.user.batch_weight(fetched.batch)
                if weight is None:
                    raise UsageError("can't tell how many samples this batch holds: override batch_weight(batch)")
                share.note(Outcome.OK)
                return weight
        except Exception as error:  # noqa: BLE001
            # any user error must become a vote, or the other ranks wait for ever
            share.catch(error, "the data set" if error is fetched.error else "accept_batch")
        else:
            share.note(Outcome.SKIP, "accept_batch refused the batch", "accept_batch")
        return 0

    def _micro_batch(self, step: int, batch: Any, weight: int, share: Share, phase: str | None, index: int) -> None:
        parts = self._parts
        ACTIVITY.enter("training_step")
        parts.user.log().paused = not weight  # a batch that is repeated must not count twice in what the user logs
        value = parts.reduction.forward(
            lambda: self._must_succeed(step, batch, weight, share.at_hand),
            first=index == 0,
            last=index == parts.accumulate - 1,
        )
        parts.user.log().paused = False
        if index == 0 and parts.reduction.holds_gradients():
            raise parts.failed(step, OWN_BACKWARD, "training_step", share.at_hand)
        loss = Loss(value, weight)
        ACTIVITY.enter("backward")
        try:
            parts.backward(loss, phase)
        except Exception as error:
            raise self._broken(step, error, "backward", share.at_hand) from error
        if weight:
            share.log(loss)

    def _must_succeed(self, step: int, batch: Any, weight: int, work: Work | None) -> torch.Tensor:
        """A step that must give a loss: other ranks are inside this forward's collectives, and nothing can end those
        for them."""
        try:
            returned = self._parts.training_step(batch, weight)
        except Exception as error:
            raise self._broken(step, error, "training_step", work) from error
        loss = returned if isinstance(returned, Loss) else Loss(returned)
        if not isinstance(loss.value, torch.Tensor) or not loss.value.requires_grad:
            reason = (
                "training_step gave no loss with a graph. Where forward communicates, leave batches out in accept_batch"
            )
            raise self._parts.failed(step, reason, "training_step", work)
        if weight and loss.weight is not None and int(loss.weight) != weight:
            reason = f"the loss has weight {int(loss.weight)}, but batch_weight(batch) voted {weight} before"
            raise self._parts.failed(step, reason, "training_step", work)
        return loss.value

    def _broken(self, step: int, error: Exception, phase: str, work: Work | None) -> RankFailed:
        """The end of this rank; the others, inside of the collectives that it leaves, end with it."""
        explained = self._parts.reduction.explain(error)
        reason = f"{type(explained).__name__}: {explained} at {place_of(error)}"
        return self._parts.failed(step, reason, phase, work)
