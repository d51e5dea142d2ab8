"""Batches of any shape: how many samples, and the way to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from safetrain.data import count_samples, move

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    name: str
    x: torch.Tensor
    derived: Any = field(init=False, default=None)


def x(samples: int = 3) -> torch.Tensor:
    return torch.zeros(samples, 2)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (x(5), 5),
        ((x(4), x(7)), 4),
        ({"name": "a", "x": [x(6)]}, 6),
        ([torch.tensor(1.0), x(2)], 2),
        (Sample("a", x(3)), 3),
        (Pair(None, x(3)), 3),
        (UserDict(x=x(8)), 8),
        (torch.zeros(0, 2), 0),
        (torch.tensor(1.0), None),
        (["a", "b"], None),
        ("text", None),
        (None, None),
        ([], None),
    ],
)
def test_samples_are_dimension_0_of_the_first_tensor(batch: Any, samples: int | None) -> None:
    assert count_samples(batch) == samples


@pytest.mark.parametrize(
    "batch",
    [
        (x(),),
        [x()],
        {"x": x(), "n": 1},
        OrderedDict(x=x()),
        defaultdict(torch.Tensor, x=x()),
        UserDict(x=x()),
        Pair(x(), "y"),
    ],
)
def test_moving_keeps_the_container(batch: Any) -> None:
    moved = move(batch, META)
    assert type(moved) is type(batch)
    first = lambda container: next(iter(container.values())) if hasattr(container, "values") else container[0]  # noqa: E731
    assert first(moved).device == META
    assert first(batch).device.type == "cpu", "the given batch is left as it was"
    assert getattr(moved, "default_factory", None) == getattr(batch, "default_factory", None)


def test_a_frozen_dataclass_moves() -> None:
    sample = Sample("a", x())
    moved = move({"deep": [sample]}, META)["deep"][0]
    assert (moved.name, moved.x.device, moved.derived) == ("a", META, None)
    assert sample.x.device.type == "cpu"


def test_an_object_that_can_move_moves_itself() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    assert move([packed], META)[0].data.device == META


def test_what_holds_no_tensor_is_passed_on() -> None:
    marker = object()
    assert move([marker, "text", None], META) == [marker, "text", None]
