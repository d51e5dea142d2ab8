"""Optimizers and schedulers from what the user gave, and the refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from safetrain.build import build_optimizers, build_schedulers, check_optimizers
from safetrain.errors import UsageError

sgd = partial(torch.optim.SGD, lr=0.1)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(2, 2), nn.Linear(2, 1)


def test_one_optimizer_has_all_parameters_frozen_ones_too() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (optimizer,) = build_optimizers(sgd, model).values()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    check_optimizers({"optimizer": optimizer}, model)


def test_optimizers_by_name_of_a_submodule() -> None:
    model = Gan()
    optimizers = build_optimizers({"generator": sgd, "discriminator": partial(torch.optim.Adam, lr=1.0)}, model)
    assert type(optimizers["discriminator"]) is torch.optim.Adam
    assert optimizers["generator"].param_groups[0]["params"] == list(model.generator.parameters())
    check_optimizers(optimizers, model)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.05),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01, maximize=True),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(torch.optim.Adam, lr=0.05, weight_decay=0.1, amsgrad=True),
        partial(torch.optim.Adam, lr=0.05, betas=(0.5, 0.9), eps=1e-3, maximize=True),
        partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=0.05, amsgrad=True, maximize=True),
    ],
)
def test_steps_on_lists_are_the_steps_of_a_plain_loop_to_the_bit(make: Any) -> None:
    weights = []
    for lists in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))
        optimizer = build_optimizers(make, model)["optimizer"] if lists else make(model.parameters())
        assert optimizer.param_groups[0]["foreach"] is (True if lists else None)
        for step in range(20):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * 10 ** (step % 5 - 3)
            optimizer.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("make", "width", "chosen"),
    [
        (partial(torch.optim.SGD, lr=0.1, foreach=False), 2, False),
        (partial(torch.optim.SGD, lr=0.1, fused=True), 2, None),
        (partial(torch.optim.RMSprop, lr=0.1), 2, None),  # not tried for the same bits
        (sgd, 1024, True),
        (sgd, 1025, None),  # 4 MiB and more
    ],
)
def test_lists_are_for_small_models_whose_user_has_not_chosen(make: Any, width: int, chosen: bool | None) -> None:
    (optimizer,) = build_optimizers(make, nn.Linear(width, 1024, bias=False)).values()
    assert optimizer.param_groups[0]["foreach"] is chosen


def test_schedulers_go_with_their_optimizers() -> None:
    optimizers = build_optimizers({"generator": sgd, "discriminator": sgd}, Gan())
    step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    assert set(build_schedulers(step_lr, optimizers, 10)) == {"generator", "discriminator"}
    assert set(build_schedulers({"generator": step_lr}, optimizers, None)) == {"generator"}
    with pytest.raises(UsageError, match="scheduler for critic: there is no such optimizer"):
        build_schedulers({"critic": step_lr}, optimizers, 10)


def test_a_scheduler_that_wants_total_steps_gets_the_runs() -> None:
    optimizers = build_optimizers(sgd, nn.Linear(2, 2))
    one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0)
    (scheduler,) = build_schedulers(one_cycle, optimizers, 40).values()
    assert isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)
    assert scheduler.total_steps == 40
    (scheduler,) = build_schedulers(partial(one_cycle, total_steps=7), optimizers, 40).values()
    assert scheduler.total_steps == 7


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"critic": sgd}, "no submodule of that name; it has generator, discriminator"),
        ({"generator": sgd}, "in no optimizer: discriminator.weight, discriminator.bias"),
        (
            torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1),
            r"tensor of shape \(3,\) that is not in the model",
        ),
        (3, "optimizer=3: give a callable"),
    ],
)
def test_what_cannot_train_the_model_is_refused_by_name(given: Any, words: str) -> None:
    model = Gan()
    with pytest.raises(UsageError, match=words):
        check_optimizers(build_optimizers(given, model), model)


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model = Gan()
    optimizers = {"all": sgd(model.parameters()), "generator": sgd(model.generator.parameters())}
    with pytest.raises(UsageError, match=r"generator\.weight is in the optimizers 'all' and 'generator'"):
        check_optimizers(optimizers, model)
