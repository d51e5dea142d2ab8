"""One recipe under each strategy: the same losses, the same weights, and the same decisions where one vote decides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import safetrain
from safetrain.comm import Comm
from safetrain.precision import FP16, Precision
from safetrain.strategy import Strategy
from safetrain.testing import run_ranks
from tests.ranks.outcome import batches_of, feed
from tests.ranks.resuming import Recorder
from tests.ranks.toys import CLASSES, FEATURES, Batch, Classifier, adamw, assert_close, momentum_sgd

FSDP = safetrain.FSDPStrategy(shard=["Block"])
HYBRID = safetrain.FSDPStrategy(shard=["Block"], replicas=2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks; the same weights at every call. Widths that do not divide by the ranks."""

    def __init__(self, width: int = 14) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.blocks = nn.Linear(FEATURES, width), nn.ModuleList([Block(width), Block(width)])
        self.outside = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.outside(x)


def whole(trainer: safetrain.Trainer) -> dict[str, torch.Tensor]:
    """Weights and buffers, gathered from all ranks."""
    tensors = {name: value.detach() for name, value in trainer.model.state_dict().items()}
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in tensors.items()}


def trained(
    comm: Comm, strategy: Strategy, batches: Sequence[Sequence[Any]], **given: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of each step, over all ranks, and the weights at the end."""
    told: list[safetrain.Event] = []
    parts: dict[str, Any] = {"optimizer": adamw, "loop": safetrain.Loop(log_every_steps=1, nominal_weight=4)}
    trainer = given.pop("kind", Classifier)(
        given.pop("model", Net)(), feed(batches), strategy=strategy, observers=[Recorder(told)], **(parts | given)
    )
    trainer.fit()
    losses = [event.metrics["train/loss"] for event in told if "train/loss" in event.metrics]
    norms = [event.metrics["train/grad_norm"] for event in told if "train/grad_norm" in event.metrics]
    return losses, norms, whole(trainer)


@pytest.mark.parametrize("strategy", [FSDP, HYBRID, safetrain.FSDPStrategy(checkpoint_activations=True)])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adamw])
def test_the_losses_are_those_of_ddp_and_of_one_process(
    world_size: int, strategy: Strategy, accumulate: int, make_optimizer: partial[torch.optim.Optimizer]
) -> None:
    batches = batches_of(world_size, 9)
    loop = safetrain.Loop(log_every_steps=1, accumulate=accumulate, clip_norm=0.5, nominal_weight=4)

    def work(comm: Comm, chosen: Strategy, batches: Sequence[Sequence[Any]], loop: safetrain.Loop) -> Any:
        return trained(comm, chosen, batches, optimizer=make_optimizer, loop=loop)

    found = run_ranks(work, world_size, strategy, batches, loop)
    by_ddp = run_ranks(work, world_size, safetrain.DDPStrategy(), batches, loop)
    joined: list[Batch] = [
        (torch.cat([of_rank[step][0] for of_rank in batches]), torch.cat([of_rank[step][1] for of_rank in batches]))
        for step in range(9)
    ]
    single_loop = safetrain.Loop(
        log_every_steps=1, accumulate=accumulate, clip_norm=0.5, nominal_weight=4 * world_size
    )
    (alone,) = run_ranks(work, 1, safetrain.SingleStrategy(), [joined], single_loop)
    for losses, norms, weights in found:
        assert len(losses) == 9 // accumulate
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert losses == pytest.approx(by_ddp[0][0], rel=1e-5)
        assert norms == pytest.approx(alone[1], rel=1e-5)
        assert_close(weights, alone[2], 1e-5)
    assert max(alone[1]) > 0.5, "the clip took part"
