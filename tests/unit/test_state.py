"""Each part of a run's state: what one process saves, another takes over; what does not fit is told by name."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from safetrain import tree
from safetrain.errors import CheckpointError, UsageError
from safetrain.keeping import metric_in
from safetrain.metrics import MetricLog
from safetrain.precision import BF16, FP16, FP32
from safetrain.seeding import RankRandom, seed_generators
from safetrain.state import (
    BufferState,
    Flag,
    FrozenState,
    LogState,
    ModelState,
    OptimizerState,
    PrecisionState,
    RunState,
    SchedulerState,
    Value,
)

CPU = torch.device("cpu")


def written(state: Any) -> Any:
    """Through what a checkpoint lets through, and a file."""
    file = io.BytesIO()
    torch.save(tree.rebuild(state, lambda _, tensor: tensor.clone()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def net(seed: int = 0, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


class TestModel:
    def test_round_trip(self) -> None:
        model, other = net(0), net(1)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ModelState(other).load_state_dict(written(ModelState(model).state_dict()))
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda state: state.pop("2.bias"), "model of the checkpoint does not fit this run; missing: 2.bias"),
            (lambda state: state.update(more=torch.ones(1)), "extra: more"),
            (
                lambda state: state.update({"0.weight": torch.ones(4, 5)}),
                r"0.weight is .* of shape \(4, 5\) in the",
            ),
            (lambda state: state.update({"2.bias": torch.ones(2).half()}), "2.bias is torch.float16 of shape"),
        ],
    )
    def test_what_does_not_fit_is_named(self, change: Callable[[dict[str, Any]], Any], words: str) -> None:
        state = dict(ModelState(net()).state_dict())
        change(state)
        model = net(1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=words):
            ModelState(model).load_state_dict(state)
        assert all(map(torch.equal, before.values(), model.state_dict().values()))

    def test_what_was_frozen_is_frozen(self) -> None:
        model, other = net(), net()
        model[0].requires_grad_(False)
        other[2].requires_grad_(False)
        FrozenState(other).load_state_dict(written(FrozenState(model).state_dict()))
        assert [p.requires_grad for p in other.parameters()] == [False, False, True, True, True, True]


class TestOptimizer:
    @pytest.mark.parametrize(
        "make",
        [
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
            partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
            partial(torch.optim.Adam, lr=torch.tensor(0.01)),
            partial(torch.optim.Adagrad, lr=0.1),
            partial(torch.optim.RMSprop, lr=0.01, centered=True),
            partial(torch.optim.ASGD, lr=0.01),
        ],
    )
    def test_round_trip(self, make: Any) -> None:
        model, other = net(0), net(1)
        optimizer = make(model.parameters())
        train(model, optimizer)
        other.load_state_dict(model.state_dict())
        another = make(other.parameters())
        saved = written(OptimizerState("optimizer", optimizer, model).state_dict())
        OptimizerState("optimizer", another, other).load_state_dict(saved)
        train(model, optimizer)
        train(other, another)
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))

    def test_parameters_are_known_by_name_not_by_their_place(self) -> None:
        model, other = net(0), net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer)
        another = torch.optim.SGD(list(reversed(list(other.parameters()))), lr=0.1, momentum=0.9)
        saved = written(OptimizerState("optimizer", optimizer, model).state_dict())
        OptimizerState("optimizer", another, other).load_state_dict(saved)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(optimizer.state[mine]["momentum_buffer"], another.state[theirs]["momentum_buffer"])

    def test_state_of_another_dtype_than_its_parameter_is_not_rounded(self) -> None:
        model = net().to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exact = torch.tensor([1.0001, 1.0002])
        optimizer.state[model[2].bias]["mean"] = exact
        saved = written(OptimizerState("optimizer", optimizer, model).state_dict())
        OptimizerState("optimizer", optimizer, model).load_state_dict(saved)
        assert torch.equal(optimizer.state[model[2].bias]["mean"], exact)

    def test_what_does_not_fit_is_named(self) -> None:
        model = net()
        whole = OptimizerState("body", torch.optim.SGD(model.parameters(), lr=0.1), model)
        part = OptimizerState("body", torch.optim.SGD(model[0].parameters(), lr=0.1), model)
        split = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1:].parameters()}], lr=0.1)
        with pytest.raises(CheckpointError, match=r"optimizer 'body', group 0, of the checkpoint .*extra: 1.bias"):
            part.load_state_dict(whole.state_dict())
        with pytest.raises(CheckpointError, match="optimizer 'body' has 2 parameter groups, and 1 in the checkpoint"):
            OptimizerState("body", split, model).load_state_dict(whole.state_dict())


def _sequence(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedulers.LinearLR(optimizer, total_iters=3), schedulers.MultiStepLR(optimizer, [2, 4], gamma=0.5)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3])


@pytest.mark.parametrize(
    "make",
    [
        partial(schedulers.OneCycleLR, max_lr=1.0, total_steps=20),
        partial(schedulers.MultiStepLR, milestones=[3, 6, 6], gamma=0.5),
        partial(schedulers.CosineAnnealingWarmRestarts, T_0=4),
        partial(schedulers.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        partial(schedulers.CyclicLR, base_lr=0.1, max_lr=1.0, step_size_up=4),
        _sequence,
    ],
)
def test_schedulers_go_on(make: Any) -> None:
    def build() -> tuple[Any, Any, nn.Module]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return optimizer, make(optimizer), model

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    optimizer, scheduler, model = build()
    rates(optimizer, scheduler, 5)
    another, resumed, other = build()
    saved = written(OptimizerState("optimizer", optimizer, model).state_dict())
    OptimizerState("optimizer", another, other).load_state_dict(saved)
    SchedulerState("optimizer", resumed).load_state_dict(written(SchedulerState("optimizer", scheduler).state_dict()))
    assert rates(optimizer, scheduler, 8) == rates(another, resumed, 8)


def test_a_schedule_of_another_length_goes_on_at_the_same_step(caplog: pytest.LogCaptureFixture) -> None:
    def build(total_steps: int) -> Any:
        return schedulers.OneCycleLR(torch.optim.SGD(net().parameters(), lr=0.1), max_lr=1.0, total_steps=total_steps)

    shorter, longer, resumed = build(10), build(20), build(20)
    for scheduler in (shorter, longer):
        for _ in range(7):
            scheduler.optimizer.step()
            scheduler.step()
    SchedulerState("optimizer", resumed).load_state_dict(written(SchedulerState("optimizer", shorter).state_dict()))
    for scheduler in (longer, resumed):
        scheduler.optimizer.step()
        scheduler.step()
    assert resumed.get_last_lr() == longer.get_last_lr()
    assert "'optimizer' was made for 10 steps, and is for 20 here: it goes on at step 7 of those" in caplog.text


class TestPrecision:
    def test_the_loss_scale_goes_on(self) -> None:
        precision, other = FP16(init_scale=8.0, growth_interval=5), FP16(init_scale=2.0)
        for each in (precision, other):
            each.prepare(CPU)
        assert precision.scaler is not None
        assert other.scaler is not None
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(3):
            precision.scale(parameter.sum()).backward()
            precision.scaler.step(optimizer)
            precision.scaler.update()
        PrecisionState(other).load_state_dict(written(PrecisionState(precision).state_dict()))
        assert other.scaler.state_dict() == precision.scaler.state_dict()
        assert other.scaler.state_dict()["_growth_tracker"] == 3

    @pytest.mark.parametrize("other", [FP32(), BF16()])
    def test_a_run_goes_on_in_another_precision(self, other: Any) -> None:
        """What to do about gradients that fp16 can't hold; a scale is searched for anew where there was none."""
        precision = FP16(init_scale=8.0)
        precision.prepare(CPU)
        other.prepare(CPU)
        with_scale = PrecisionState(precision).state_dict()
        PrecisionState(other).load_state_dict(with_scale)
        assert PrecisionState(other).state_dict() == {}
        PrecisionState(precision).load_state_dict(PrecisionState(other).state_dict())
        assert PrecisionState(precision).state_dict() == with_scale


class TestOwn:
    def test_generators_go_on(self) -> None:
        def draw() -> tuple[float, float, float]:
            return random.random(), float(np.random.rand()), float(torch.rand(()))

        mine = RankRandom(seed=0, rank=1, device=CPU)
        seed_generators(5)
        draw()
        np.random.randn()  # leaves a second value behind for the next call
        saved = written(mine.state_dict())
        expected = draw(), float(np.random.randn())
        seed_generators(6)
        mine.load_state_dicts([{}, saved], 2)
        assert (draw(), float(np.random.randn())) == expected

    def test_on_another_number_of_ranks_generators_begin_anew(self) -> None:
        saved = []
        for seed in (5, 6):
            seed_generators(seed)
            saved.append([RankRandom(0, 0, CPU).state_dict()] * 2)
        drawn = set()
        for rank in range(3):
            for states in saved:
                RankRandom(0, rank, CPU).load_state_dicts(states, 3)
                drawn.add(float(torch.rand(())))
        assert len(drawn) == 6

    def test_metrics_of_more_ranks_are_not_lost(self) -> None:
        states = []
        for rank in range(3):
            log = MetricLog()
            log.add("loss", float(rank), weight=2)
            log.add("right", torch.tensor([1.0, float(rank)]), how="sum")
            states.append(written(log.state_dict()))
        logs = [MetricLog(), MetricLog()]
        for rank, log in enumerate(logs):
            LogState(lambda log=log: log, rank).load_state_dicts(states, 2)

        class Alone:
            def gather(self, value: Any) -> list[Any]:
                return [value]

            def sum_vector(self, values: Any) -> list[float]:
                return list(values)

        found = [log.reduce(Alone()) for log in logs]
        assert found == [{"loss": 1.0, "right": 4.0}, {"loss": 1.0, "right": 2.0}]

    def test_buffers_that_differ_go_back_to_their_rank(self) -> None:
        models = [net(), net()]
        for rank, model in enumerate(models):
            model[1].running_mean.fill_(rank)
        states = [written(BufferState(model, rank, differ=True).state_dict()) for rank, model in enumerate(models)]
        other = net(1)
        weight = other[0].weight.clone()
        BufferState(other, 1, differ=True).load_state_dicts(states, 2)
        assert other[1].running_mean.tolist() == [1.0] * 4
        assert torch.equal(other[0].weight, weight)
        assert BufferState(other, 1, differ=False).state_dict() == {}

    def test_one_rank_that_wants_to_stop_is_enough(self) -> None:
        wanted: list[bool] = []
        Flag(lambda: True, wanted.append).load_state_dicts([False, True], 1)
        assert wanted == [True]


def test_a_metric_that_is_not_there_is_an_error_of_all_ranks() -> None:
    assert metric_in({"val/acc": 0.5}, "val/acc") == 0.5
    assert metric_in({}, "val/acc") is metric_in({"val/acc": 0.5}, None) is None
    words = "metric=val/acc: validation did not log it. Did you mean val/accuracy\\? Logged: val/accuracy."
    with pytest.raises(UsageError, match=words) as told:
        metric_in({"val/accuracy": 0.5}, "val/acc")
    assert told.value.together


def test_a_part_that_is_missing_or_extra_is_named() -> None:
    kept: dict[str, Any] = {}
    parts = {name: Value(lambda name=name: name, partial(kept.__setitem__, name)) for name in ("model", "extra")}
    run = RunState(parts, {})
    saved = run.save_shared()
    run.load_shared(saved)
    assert kept == {"model": "model", "extra": "extra"}
    with pytest.raises(CheckpointError, match="the checkpoint does not fit this run; missing: extra; extra: ema"):
        run.load_shared({"model": "model", "ema": 1})
