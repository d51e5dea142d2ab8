"""Evaluation: every sample of every rank once, the bare model, and no collective before the end.

Ranks may have different numbers of batches: nothing is paired between them until all are through their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from safetrain.comm import Comm
from safetrain.contain import Share
from safetrain.data import Feed
from safetrain.errors import PeerFailed, RankFailed
from safetrain.metrics import MetricLog
from safetrain.precision import Precision


def evaluate(
    model: nn.Module,
    feed: Feed,
    step_fn: Callable[[Any], None],
    log: MetricLog,
    precision: Precision,
    comm: Comm,
    *,
    step: int,
) -> dict[str, float]:
    """Call ``step_fn`` on every batch of this rank; what it put into ``log``, over all ranks, as ``val/<name>``.

    Raises:
        RankFailed, PeerFailed: on all ranks, when ``step_fn`` or the data failed on one.
    """
    share = Share()
    was_training = model.training
    model.eval()
    with torch.no_grad():
        feed.begin_epoch(0)
        while share.error is None and not (fetched := feed.take()).empty:
            try:
                if fetched.error is not None:
                    raise fetched.error
                log.batch_weight = 1 if fetched.samples is None else fetched.samples
                with precision.autocast():
                    step_fn(fetched.batch)
            except Exception as error:  # noqa: BLE001
                # the other ranks must hear of it, or they wait for this one's metrics
                share.catch(error, "validation_step")
                share.error = error
    model.train(was_training)
    reasons = comm.gather(share.reason if share.error is not None else None)
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if share.error is not None:
        text = f"rank {comm.rank} failed at step {step}: {share.reason}"
        raise RankFailed(text, step=step, phase="validation_step") from share.error
    if failed:
        text = "; ".join(f"rank {rank} failed at step {step}: {reason}" for rank, reason in failed.items())
        raise PeerFailed(text, ranks=list(failed), step=step)
    return {f"val/{name}": value for name, value in log.reduce(comm).items()}
