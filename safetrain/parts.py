"""What a window works with, and what both of its orders (train_then_vote.py, vote_then_train.py) share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.optim import Optimizer

from safetrain.activity import ACTIVITY
from safetrain.ballot import Outcome, Vote, fingerprint
from safetrain.comm import Comm
from safetrain.contain import Loss, Share
from safetrain.errors import RankFailed, RanksDiffer, UsageError
from safetrain.feed import Feed
from safetrain.metrics import MetricLog
from safetrain.out_of_memory import Census
from safetrain.policies import Policies
from safetrain.precision import Precision
from safetrain.reducing import Reduction
from safetrain.work import Work

if TYPE_CHECKING:
    from safetrain.trainer import Trainer


@dataclass(frozen=True)
class UserCode:
    """The user's methods, and what he said outside them."""

    training_step: Callable[[Any], Any]
    accept_batch: Callable[[Any], bool]
    batch_weight: Callable[[Any], int | None]
    stop_wanted: Callable[[], bool]
    save_wanted: Callable[[], bool]
    leave_wanted: Callable[[], bool]
    log: Callable[[], MetricLog]

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """The methods of a trainer, and its wishes."""
        return cls(
            training_step=trainer.training_step,
            accept_batch=trainer.accept_batch,
            batch_weight=trainer.batch_weight,
            stop_wanted=lambda: trainer._stop_wanted,
            save_wanted=lambda: trainer._run.keeper.wishes(),
            leave_wanted=lambda: trainer._leave.wanted,
            log=lambda: trainer._log,
        )


@dataclass(frozen=True)
class Parts:
    """One rank's training machinery, finished."""

    comm: Comm
    reduction: Reduction
    feed: Feed
    user: UserCode
    optimizers: Mapping[str, Optimizer]
    precision: Precision
    policies: Policies
    census: Census
    accumulate: int  # micro-batches a window
    nominal_weight: int  # weight of a full micro-batch

    def training_step(self, batch: Any, samples: int | None) -> Any:
        """The user's step in the run's precision; what it logs stands for ``samples`` where it does not say."""
        self.user.log().batch_weight = 1 if samples is None else samples
        with self.precision.autocast():
            return self.user.training_step(batch)

    def backward(self, loss: Loss, phase: str | None) -> None:
        """Backward of a micro-batch's mean loss, weighted so that DDP's average over ranks comes out as the exact
        mean."""
        losses = loss.value if isinstance(loss.value, Mapping) else {phase: loss.value}
        for index, (name, value) in enumerate(losses.items()):
            if loss.weight == self.nominal_weight:
                scaled = value if self.accumulate == 1 else value / self.accumulate  # as a plain loop does, to the bit
            else:
                scaled = value * (int(loss.weight or 0) / (self.nominal_weight * self.accumulate))
            inputs = None if name is None else self.reduction.backward_inputs(self.trained_by(name))
            self.precision.scale(scaled).backward(inputs=inputs, retain_graph=index < len(losses) - 1)

    def trained_by(self, optimizer_name: str) -> list[torch.Tensor]:
        """The trainable parameters of one optimizer."""
        if optimizer_name not in self.optimizers:
            raise UsageError(
                f"training_step names optimizer {optimizer_name!r}: there are {', '.join(self.optimizers)}"
            )
        groups = self.optimizers[optimizer_name].param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]

    def vote(self, step: int, applied_steps: int, share: Share) -> Vote:
        """This rank's vote; a failure's words are left in the store, where the others find them after the vote."""
        if share.outcome is Outcome.FAILED:
            self.comm.post(f"failure/{step}/{self.comm.rank}", share.reason)
        ACTIVITY.enter("data")
        return Vote(
            step=step,
            applied_steps=applied_steps,
            outcome=share.outcome,
            weight=share.weight,
            # between backward and the vote: the order of a plain loop, hidden behind the buckets that are under way;
            # not after a failure, since a loader whose worker is gone takes 5 s to say so again
            more_data=share.outcome is Outcome.FAILED or self.feed.look_ahead(),
            stop=self.user.stop_wanted(),
            save=self.user.save_wanted(),
            leave=self.user.leave_wanted(),
            collectives=self.comm.collectives.close(),
            log_keys=fingerprint([*self.user.log().signature(), *(name for name, _, _ in share.losses)]),
        )

    def compare_collectives(self, step: int) -> None:
        """Find out why the ranks' fingerprints differ; all ranks are here.

        Raises:
            RanksDiffer: on all ranks; with both sides' call sites.
        """
        collectives = self.comm.collectives
        if difference := collectives.judge(self.comm.gather(collectives.voted())):
            raise RanksDiffer(difference, step=step)

    def failed(self, step: int, reason: str, phase: str, work: Work | None) -> RankFailed:
        """The error that says this rank failed, with the batch ``work`` at hand."""
        return RankFailed.at(step, self.comm.rank, reason, phase, work)
