"""Every policy where each rank has a shard: the decisions, and the weights, are those of DDP where the vote comes
first; and what only shards can do wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import safetrain
import safetrain.sharding  # torch.distributed.fsdp takes a second: once in the parent of all ranks
from safetrain import policies
from safetrain.comm import Comm
from safetrain.out_of_memory import owners
from safetrain.precision import BF16, FP16, FP32
from safetrain.strategy import Strategy
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_all_stopped, assert_clean, batches_of, end_of, feed, windows_of
from tests.ranks.toys import (
    CLASSES,
    FEATURES,
    Batch,
    Block,
    Blocks,
    Classifier,
    adamw,
    assert_close,
    assert_same,
    momentum_sgd,
    train_alone,
)

FSDP = safetrain.FSDPStrategy(shard=["Block"])
HYBRID = safetrain.FSDPStrategy(shard=["Block"], replicas=2)
VOTES_FIRST = safetrain.DDPStrategy(forward_communicates=True)


class Refuses(Classifier):
    """Leaves out what begins with a certain number."""

    def accept_batch(self, batch: Batch) -> bool:
        return float(batch[0][0, 0]) != 99.0


def refused(batch: Batch) -> Batch:
    x = batch[0].clone()
    x[0, 0] = 99.0
    return x, batch[1]


def not_a_number(batch: Batch) -> Batch:
    return torch.full_like(batch[0], float("nan")), batch[1]


@dataclass(frozen=True)
class Case:
    """What is wrong with the culprit's third batch, and what is to become of the run."""

    spoil: Callable[[list[Any]], None]
    given: dict[str, Any]
    applied_steps: int = 0
    error: str = ""


def third_is(change: Callable[[Batch], Any]) -> Callable[[list[Any]], None]:
    def spoil(batches: list[Any]) -> None:
        batches[2] = change(batches[2])

    return spoil


def shorter(batches: list[Any]) -> None:
    del batches[3:]


CASES = {
    "skip_any": Case(third_is(refused), {}, 4),
    "skip_partial": Case(third_is(refused), {"skip": policies.SkipPartial()}, 5),
    "skip_all": Case(third_is(refused), {"skip": policies.SkipAll()}, 5),
    "uneven_stop": Case(shorter, {}, 3),
    "uneven_continue": Case(shorter, {"uneven": policies.UnevenContinue()}, 5),
    "non_finite_skip": Case(third_is(not_a_number), {}, 4),
    "non_finite_stop": Case(third_is(not_a_number), {"non_finite": policies.NonFiniteStop()}, error="TrainingStopped"),
    "error_in_data": Case(third_is(lambda _: OSError("unreadable")), {}, error="failed"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", [FSDP, HYBRID], ids=["fsdp", "hybrid"])
def test_a_policy_decides_as_it_does_under_ddp(place: Place, case: str, strategy: Strategy) -> None:
    chosen = CASES[case]
    batches = batches_of(place.world_size, 5)
    chosen.spoil(batches[place.culprit])

    def work(comm: Comm, strategy: Strategy) -> Ended:
        loop = safetrain.Loop(nominal_weight=4, clip_norm=0.5)
        given = {"policies": safetrain.Policies(**chosen.given), "loop": loop, "strategy": strategy}
        return end_of(Refuses(Blocks(), feed(batches), optimizer=adamw, **given))

    found = run_ranks(work, place.world_size, strategy)
    by_ddp = run_ranks(work, place.world_size, VOTES_FIRST)
    if chosen.error == "failed":
        assert_all_stopped(found, place, 2, "OSError: unreadable")
    elif chosen.error:
        assert [(end.error, end.step) for end in found] == [(chosen.error, 2)] * place.world_size
    else:
        assert_same([end.state for end in found])
    for mine, theirs in zip(found, by_ddp, strict=True):
        text = theirs.text.partition(" The first gradient")[0]  # which a rank with shards can't tell
        assert (mine.error, mine.text, mine.step, mine.ranks) == (theirs.error, text, theirs.step, theirs.ranks)
        assert mine.applied_steps == theirs.applied_steps == chosen.applied_steps
        assert_close(mine.state, theirs.state, 1e-6)


class Chooses(nn.Module):
    """One block with two ways through; which one, the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, 14), nn.Linear(FEATURES, 14)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(x) if float(x[0, 0]) == 99.0 else self.left(x)


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = Chooses(), nn.Linear(14, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.inside(x))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adamw])
def test_a_parameter_that_a_block_does_not_use(place: Place, accumulate: int, make_optimizer: Any) -> None:
    """Used on one rank, it is zero on the others; used on none, neither momentum nor weight decay moves it."""
    batches = batches_of(place.world_size, 8)
    for step in (2, 3):
        batches[place.culprit][step] = refused(batches[place.culprit][step])
    batches[place.culprit][7] = refused(batches[place.culprit][7])

    def work(comm: Comm) -> Ended:
        loop, strategy = safetrain.Loop(accumulate=accumulate), safetrain.FSDPStrategy(shard=["Chooses"])
        return end_of(Classifier(Ways(), feed(batches), optimizer=make_optimizer, loop=loop, strategy=strategy))

    ended = run_ranks(work, place.world_size)
    assert_clean(ended, step=8 // accumulate)
    windows = windows_of(batches, accumulate)
    assert_close(ended[0].state, run_ranks(lambda _: train_alone(Ways(), windows, make_optimizer), 1)[0])


class Skips(Blocks):
    """A choice between blocks by the data: what shards can't do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        inside = self.inside(x)
        return self.outside(second(inside) if float(x[0, 0]) == 99.0 else first(inside))


def test_ranks_that_run_different_blocks_stop_before_the_optimizer_step(place: Place) -> None:
    """Both blocks gather as much, so torch pairs one with the other without a word."""
    batches = batches_of(place.world_size, 4)
    batches[place.culprit][2] = refused(batches[place.culprit][2])

    def work(comm: Comm) -> Ended:
        return end_of(Classifier(Skips(), feed(batches), optimizer=adamw, strategy=FSDP))

    ended = run_ranks(work, place.world_size)
    other = place.culprit or 1
    mine, theirs = ("blocks.0", "blocks.1") if place.culprit else ("blocks.1", "blocks.0")
    for end in ended:
        assert (end.error, end.step) == ("RanksDiffer", 2)
        assert f"block 2 of this step was {mine} on rank 0 and {theirs} on rank {other}." in end.text


class Normed(Blocks):
    """Its forward depends on a buffer in training, too."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("center", torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + self.center)
        if self.training:
            self.center = 0.5 * self.center + 0.5 * x.detach().mean(0)
        return super().forward(self.norm(x))


def test_buffers_and_metrics_are_those_of_ddp(world_size: int) -> None:
    """Between two epochs, ranks validate on shares of different length."""
    batches = batches_of(world_size, 5)
    batches[-1][2] = refused(batches[-1][2])
    validation = batches_of(world_size, [1, *[3] * (world_size - 1)])

    def work(comm: Comm, strategy: Strategy) -> Ended:
        loop = safetrain.Loop(epochs=2)
        trainer = Refuses(Normed(), feed(batches), feed(validation), optimizer=adamw, strategy=strategy, loop=loop)
        return end_of(trainer)

    found, by_ddp = run_ranks(work, world_size, FSDP), run_ranks(work, world_size, VOTES_FIRST)
    assert_clean(found, step=10, applied_steps=8)
    assert_close(found[0].state, by_ddp[0].state)
    assert [end.metrics for end in found] == [pytest.approx(end.metrics, rel=1e-6) for end in by_ddp]


class Schedule(Classifier):
    """Freezes the first block in the second epoch, and lets it learn again in the third."""

    def on_epoch_start(self) -> None:
        self.model.get_submodule("blocks.0").requires_grad_(self.epoch != 1)


def test_a_block_is_frozen_and_unfrozen(world_size: int) -> None:
    batches = batches_of(world_size, 3)

    def work(comm: Comm, strategy: Strategy) -> Ended:
        loop = safetrain.Loop(epochs=3)
        return end_of(Schedule(Blocks(), feed(batches), optimizer=momentum_sgd, loop=loop, strategy=strategy))

    found, by_ddp = run_ranks(work, world_size, FSDP), run_ranks(work, world_size, VOTES_FIRST)
    assert_clean(found, step=9)
    assert_close(found[0].state, by_ddp[0].state)


def test_a_block_that_is_added_in_training_is_refused() -> None:
    class Grows(Classifier):
        def on_epoch_start(self) -> None:
            if self.epoch == 1:
                self.model.get_submodule("blocks").append(Block(14))  # type: ignore[operator]
                self.optimizers["optimizer"].add_param_group(
                    {"params": list(self.model.get_submodule("blocks.2").parameters())}
                )

    def work(comm: Comm) -> Ended:
        return end_of(
            Grows(Blocks(), feed(batches_of(2, 3)), optimizer=adamw, loop=safetrain.Loop(epochs=2), strategy=FSDP)
        )

    for end in run_ranks(work, 2):
        assert end.error == "UsageError"
        assert "parameters can be frozen and unfrozen, but neither replaced nor added" in end.text


@pytest.mark.parametrize(
    ("strategy", "precision", "tolerance"),
    [
        (FSDP, FP16, 1e-3),
        (HYBRID, BF16, 1e-2),
        (safetrain.FSDPStrategy(shard=["Block"], param_dtype="bf16", reduce_dtype="fp32"), FP32, 3e-2),
    ],
    ids=["fp16", "bf16", "param_dtype"],
)  # fmt: skip
def test_narrow_numbers(world_size: int, strategy: Strategy, precision: Any, tolerance: float) -> None:
    """fp16's loss scale begins too high: the ranks find the overflow together, in whoever's shard it is."""
    batches = batches_of(world_size, 6)

    def work(comm: Comm, strategy: Strategy, precision: Any) -> Ended:
        trainer = Classifier(
            Blocks(), feed(batches), optimizer=momentum_sgd, strategy=strategy, precision=precision,
            loop=safetrain.Loop(clip_norm=0.5),
        )  # fmt: skip
        return end_of(trainer)

    narrow = precision(init_scale=2.0**24) if precision is FP16 else precision()
    found = run_ranks(work, world_size, strategy, narrow)
    whole = run_ranks(
        work, world_size, VOTES_FIRST, precision(init_scale=2.0**24) if precision is FP16 else precision()
    )
    assert_same([end.state for end in found])
    assert [end.applied_steps for end in found] == [end.applied_steps for end in whole]
    assert (found[0].applied_steps < 6) is (precision is FP16)
    assert all(value.dtype == torch.float32 for value in found[0].state.values())
    assert_close(found[0].state, whole[0].state, tolerance)


def test_a_weight_that_is_used_outside_of_its_block_is_explained() -> None:
    class Penalty(Classifier):
        def training_step(self, batch: Batch) -> torch.Tensor:
            weight = self.model.get_parameter("blocks.0.up.weight")
            return super().training_step(batch) + F.mse_loss(weight, torch.zeros(weight.shape))  # type: ignore[no-any-return]

    def work(comm: Comm) -> Ended:
        return end_of(Penalty(Blocks(), feed(batches_of(2, 2)), optimizer=adamw, strategy=FSDP))

    for end in run_ranks(work, 2):
        assert end.error == "RankFailed"
        assert "a parameter was used outside of its block's forward" in end.text


def test_a_class_that_is_not_in_the_model_is_named_with_the_nearest() -> None:
    def work(comm: Comm) -> Ended:
        strategy = safetrain.FSDPStrategy(shard=["Blokc"])
        return end_of(Classifier(Blocks(), feed(batches_of(2, 2)), optimizer=adamw, strategy=strategy))

    for end in run_ranks(work, 2):
        assert end.text == (
            "strategy.shard: the model has no module of class Blokc. Did you mean Block? It has: Block, LayerNorm, "
            "Linear, ModuleList."
        )


def test_models_that_can_not_be_sharded_again_or_yet() -> None:
    def work(comm: Comm) -> list[str]:
        with torch.device("meta"):
            empty = Blocks()
        model, batches = Blocks(), feed(batches_of(2, 2))
        given = {"optimizer": adamw, "strategy": FSDP}
        return [end_of(Classifier(each, batches, **given)).text for each in (model, model, empty)]

    for first, second, third in run_ranks(work, 2):
        assert first == ""
        assert second.startswith("the model is already wrapped (FSDPModule): give the bare model")
        assert third == "inside.weight is on the meta device and has no values: build the model on the CPU"


def test_a_script_with_two_ranks_can_not_be_single() -> None:
    def work(comm: Comm) -> Ended:
        strategy = safetrain.SingleStrategy()
        return end_of(Classifier(Blocks(), feed(batches_of(2, 2)), optimizer=adamw, strategy=strategy))

    for end in run_ranks(work, 2):
        assert end.error == "ConfigError"
        assert end.text.startswith("strategy=single is for one rank, and 2 are asked for")


def test_the_audit_finds_what_is_not_divided(world_size: int) -> None:
    """Shards differ by design; a learning rate must not."""

    class Drifts(Classifier):
        def training_step(self, batch: Batch) -> torch.Tensor:
            if self.step == 2 and self.comm.rank == self.comm.world_size - 1:
                self.optimizers["optimizer"].param_groups[0]["lr"] = 0.5
            return super().training_step(batch)  # type: ignore[no-any-return]

    def work(comm: Comm, kind: type[Classifier]) -> Ended:
        audit, preflight = safetrain.Audit(every_steps=1), safetrain.Preflight(deep=True)
        batches = feed(batches_of(world_size, 5))
        return end_of(kind(Blocks(), batches, optimizer=adamw, strategy=FSDP, audit=audit, preflight=preflight))

    assert_clean(run_ranks(work, world_size, Classifier), step=5)
    for end in run_ranks(work, world_size, Drifts):
        assert (end.error, end.step) == ("RanksDiffer", 3)
        assert "lr (param_groups[0])" in end.text


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(FEATURES, 14), nn.Linear(14, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def test_optimizers_that_take_turns(world_size: int) -> None:
    class Turns(Classifier):
        phases: Sequence[str] = ("a", "b")

    batches = batches_of(world_size, 6)

    def work(comm: Comm, strategy: Strategy) -> Ended:
        optimizer = {"a": momentum_sgd, "b": adamw}
        return end_of(Turns(Two(), feed(batches), optimizer=optimizer, strategy=strategy))

    found = run_ranks(work, world_size, safetrain.FSDPStrategy())
    assert_clean(found, step=6)
    assert_close(found[0].state, run_ranks(work, world_size, VOTES_FIRST)[0].state)


def test_who_held_the_memory_is_told_in_what_this_rank_has() -> None:
    def work(comm: Comm) -> tuple[int, str]:
        trainer = Classifier(Blocks(16), feed(batches_of(2, 1)), optimizer=adamw, strategy=FSDP)
        trainer.fit()
        held = {(one.kind, one.name): one for one in owners(trainer.model, trainer.optimizers)}
        return held["parameter", "blocks.0.up.weight"].bytes, held["optimizer", "blocks.0.up.weight.exp_avg"].what

    assert run_ranks(work, 2) == [(24 * 16 * 4 // 2, "a shard of 24x16 float32")] * 2
