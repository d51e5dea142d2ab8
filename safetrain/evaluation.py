"""Evaluation: every sample of every rank once, the bare model, and no collective before the end.

Ranks may have different numbers of batches: nothing is paired between them until all are through their own. Unless
forward itself communicates: then a rank that is through goes on with its last batch, and forgets what that logs.

So it can also be left at any batch, each rank at one of its own: what it gave is nothing then, and it comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from safetrain.activity import ACTIVITY
from safetrain.comm import Comm
from safetrain.contain import Share
from safetrain.errors import DataError, PeerFailed, RankFailed, UsageError, together
from safetrain.feed import Feed, Fetched
from safetrain.metrics import MetricLog
from safetrain.precision import Precision

if TYPE_CHECKING:
    from safetrain.trainer import Trainer


def validate(trainer: Trainer, leaves: Callable[[], bool]) -> dict[str, float] | None:
    """The metrics of a trainer that fits, told to its observers; None where some rank ``leaves``."""
    run, log = trainer._run, MetricLog()
    if run.val_feed is None:
        raise UsageError("validate() needs validation data: give val_data, or override build_val_data")
    ACTIVITY.enter("validation_start")
    run.reduction.share_buffers()
    train_log, trainer._log = trainer._log, log
    try:
        metrics = evaluate(
            trainer.model, run.val_feed, trainer.validation_step, trainer.on_validation_end, log, trainer.precision,
            trainer.comm, step=trainer.step, forward_communicates=trainer.strategy.forward_communicates, leaves=leaves,
        )  # fmt: skip
    finally:
        trainer._log = train_log
    if metrics is not None:
        derived = trainer.derived_metrics({name.removeprefix("val/"): value for name, value in metrics.items()})
        metrics |= {f"val/{name}": float(value) for name, value in derived.items()}
        run.reporter.validation(trainer.step, trainer.epoch, metrics)
    return metrics


def evaluate(
    model: nn.Module,
    feed: Feed,
    step_fn: Callable[[Any], None],
    end_fn: Callable[[], None],
    log: MetricLog,
    precision: Precision,
    comm: Comm,
    *,
    step: int,
    forward_communicates: bool = False,
    leaves: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Call ``step_fn`` on every batch of this rank, and ``end_fn`` when all ranks are through theirs; what they put
    into ``log``, over all ranks, as ``val/<name>``.

    None on all ranks, when one ended before its last batch because it ``leaves`` (not where forward communicates).

    Raises:
        RankFailed, PeerFailed: on all ranks, when ``step_fn``, ``end_fn`` or the data failed on one.
    """

    def goes_on(fetched: Fetched) -> bool:
        return comm.agree(not fetched.empty, "any") if forward_communicates else not fetched.empty

    share = Share()
    with _evaluating(model):
        feed.begin_epoch(0)
        last = Fetched(
            error=DataError("no validation batch on this rank: it can't take part in a forward that needs it")
        )
        left = False
        while share.error is None and not left and goes_on(fetched := feed.take()):
            ACTIVITY.enter("validation")
            log.paused, share.at_hand = fetched.empty, fetched.work
            last = last if fetched.empty else fetched
            try:
                if last.error is not None:
                    raise last.error
                log.batch_weight = 1 if last.samples is None else last.samples
                with precision.autocast():
                    step_fn(last.batch)
            except Exception as error:  # noqa: BLE001
                # the other ranks must hear of it, or they wait for this one's metrics
                share.catch(error, "validation_step")
                share.error = error
            left = not forward_communicates and leaves()
        log.paused = False
        if share.error is not None and forward_communicates:
            # the others are inside this forward's collectives
            raise _failed_here(step, comm, share) from share.error
        if _some_left(step, comm, share, left):
            return None
        ACTIVITY.enter("validation_end")
        log.batch_weight, share = 1, Share()
        try:
            end_fn()
        except Exception as error:  # noqa: BLE001  as above
            share.catch(error, "on_validation_end")
            share.error = error
        _some_left(step, comm, share, False)
    return {f"val/{name}": value for name, value in log.reduce(comm).items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _some_left(step: int, comm: Comm, share: Share, left: bool) -> bool:
    """Whether some rank has left; where one failed, all raise."""
    ACTIVITY.enter("vote")
    reasons, some_left = zip(*comm.gather((share.reason if share.error is not None else None, left)), strict=True)
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if share.error is not None:
        raise together(_failed_here(step, comm, share)) from share.error
    if failed:
        raise together(PeerFailed.at(step, failed))
    return any(some_left)


def _failed_here(step: int, comm: Comm, share: Share) -> RankFailed:
    return RankFailed.at(step, comm.rank, share.reason, share.phase, share.work)
