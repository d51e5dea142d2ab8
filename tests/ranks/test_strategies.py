"""One recipe under each strategy: the same losses, the same weights, and the same decisions where one vote decides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import safetrain
import safetrain.sharding  # this and what it imports takes a second: once in the parent of all ranks
import safetrain.tensor_files
from safetrain.comm import Comm
from safetrain.export import export
from safetrain.strategy import Strategy
from safetrain.testing import run_ranks
from tests.ranks.outcome import batches_of, feed
from tests.ranks.resuming import Recorder
from tests.ranks.toys import Batch, Blocks, Classifier, adamw, assert_close, momentum_sgd, samples, state

FSDP = safetrain.FSDPStrategy(shard=["Block"])
HYBRID = safetrain.FSDPStrategy(shard=["Block"], replicas=2)


def trained(
    comm: Comm, strategy: Strategy, batches: Sequence[Sequence[Any]], **given: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of each step, over all ranks, and the weights at the end."""
    told: list[safetrain.Event] = []
    parts: dict[str, Any] = {"optimizer": adamw, "loop": safetrain.Loop(log_every_steps=1, nominal_weight=4)}
    trainer = given.pop("kind", Classifier)(
        given.pop("model", Blocks)(), feed(batches), strategy=strategy, observers=[Recorder(told)], **(parts | given)
    )
    trainer.fit()
    losses = [event.metrics["train/loss"] for event in told if "train/loss" in event.metrics]
    norms = [event.metrics["train/grad_norm"] for event in told if "train/grad_norm" in event.metrics]
    return losses, norms, state(trainer)


@pytest.mark.parametrize(
    "strategy",
    [
        FSDP,
        HYBRID,
        safetrain.FSDPStrategy(checkpoint_activations=True),
        safetrain.FSDPStrategy(reshard_after_forward=False),
    ],
    ids=["fsdp", "hybrid", "checkpoint_activations", "gathered_once"],
)
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
    single_loop = safetrain.Loop(log_every_steps=1, accumulate=accumulate, clip_norm=0.5, nominal_weight=4 * world_size)
    (alone,) = run_ranks(work, 1, safetrain.SingleStrategy(), [joined], single_loop)
    for losses, norms, weights in found:
        assert len(losses) == 9 // accumulate
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert losses == pytest.approx(by_ddp[0][0], rel=1e-5)
        assert norms == pytest.approx(alone[1], rel=1e-5)
        assert_close(weights, alone[2], 1e-5)
    assert max(alone[1]) > 0.5, "the clip took part"


def strategy_run(
    comm: Comm, strategy: Strategy, folder: Path, resume: str = "none", max_steps: int = 8, **given: Any
) -> tuple[list[tuple[int, float]], dict[str, torch.Tensor]]:
    """A run on a data set that is the same for any number of ranks, saved every 3 steps: (step, loss), and the weights
    at the end."""
    told: list[safetrain.Event] = []
    x, y = samples(96)
    trainer = Classifier(
        Blocks(), TensorDataset(x, y), strategy=strategy, observers=[Recorder(told)], run_dir=folder, resume=resume,
        optimizer=adamw, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7),
        loop=safetrain.Loop(epochs=4, max_steps=max_steps, log_every_steps=1, clip_norm=0.5),
        loader=safetrain.Loader(batch_size=16 // comm.world_size, shuffle=False),
        checkpoint=safetrain.Checkpoint(every_steps=3, keep_last=None, at_end=False, every_epochs=None),
    )  # fmt: skip
    trainer.fit()
    losses = [(event.step, event.metrics["train/loss"]) for event in told if "train/loss" in event.metrics]
    return losses, state(trainer)


DDP, SINGLE = safetrain.DDPStrategy(), safetrain.SingleStrategy()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, FSDP), (2, FSDP)),
        ((2, FSDP), (4, HYBRID)),
        ((4, HYBRID), (1, FSDP)),
        ((4, FSDP), (4, FSDP)),
        ((2, FSDP), (1, SINGLE)),
        ((2, DDP), (4, FSDP)),
        ((4, FSDP), (2, DDP)),
    ],
    ids=lambda side: f"{side[0]}x{type(side[1]).__name__.removesuffix('Strategy')}{getattr(side[1], 'replicas', '')}",
)
def test_a_checkpoint_goes_on_with_other_ranks_and_another_strategy(
    before: tuple[int, Strategy], after: tuple[int, Strategy], tmp_path: Path
) -> None:
    (uninterrupted, weights), *_ = run_ranks(strategy_run, before[0], before[1], tmp_path / "whole")
    run_ranks(strategy_run, before[0], before[1], tmp_path / "cut", "none", 6)
    copies = getattr(before[1], "replicas", before[0])  # of DDP's and one process' each rank has one
    written = sorted(path.name for path in (tmp_path / "cut/checkpoints/step_6").glob("*.distcp"))
    assert written == [f"__{rank}_0.distcp" for rank in range(before[0] // copies)]
    found = run_ranks(strategy_run, after[0], after[1], tmp_path / "cut", "auto")
    for losses, at_end in found:
        assert [step for step, _ in losses] == [7, 8]
        for (_, loss), (_, expected) in zip(losses, uninterrupted[6:], strict=True):
            assert loss == (expected if before == after else pytest.approx(expected, rel=1e-6))
        assert_close(at_end, weights, 0.0 if before == after else 1e-6)


def test_each_rank_writes_its_shards_and_export_gives_whole_tensors(tmp_path: Path) -> None:
    """Rank 3 has nothing of a tensor with three rows or fewer; the file that each rank writes has a quarter."""
    (_, weights), *_ = run_ranks(strategy_run, 4, FSDP, tmp_path, "none", 3)
    folder = tmp_path / "checkpoints" / "step_3"
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 2 * min(sizes)
    assert export(tmp_path, tmp_path / "model.pt")
    exported = torch.load(tmp_path / "model.pt")
    assert list(exported) == list(Blocks().state_dict())
    assert_close(exported, weights, 0.0)
    assert {name: value.shape for name, value in exported.items()} == {
        name: value.shape for name, value in Blocks().state_dict().items()
    }
