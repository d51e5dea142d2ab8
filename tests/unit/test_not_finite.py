"""Which weight or gradient is told of where a run has given up on values that are not finite."""

from __future__ import annotations

import torch
from torch import nn

from safetrain.not_finite import not_finite


def test_the_first_weight_comes_before_any_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not_finite(model) == ""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert not_finite(model) == ""
    model[1].bias.grad[1] = float("nan")
    assert not_finite(model) == " The first gradient that is not finite is that of 1.bias."
    with torch.no_grad():
        model[0].weight[1, 0] = float("inf")
    assert not_finite(model).startswith(" The weights are not finite any more, the first of them 0.weight:")
