"""Nested state: each tensor has one name, everything comes back as it was, and what could not is refused by name."""

from __future__ import annotations

import collections
import enum
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from safetrain import archive, tree
from safetrain.errors import UsageError
from tests.states import assert_equal, own_state, shared_state, write_state


class Point(NamedTuple):
    x: int


class Color(enum.IntEnum):
    RED = 1


def there_and_back(state: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_state(Path(folder), state)
        return archive.read_shared(Path(folder))


def test_all_of_a_state_comes_back() -> None:
    assert_equal(there_and_back(shared_state(3)), shared_state(3))


def test_names_are_paths_and_no_two_are_the_same() -> None:
    _, tensors = tree.split(shared_state(3))
    assert {"model.0.weight", "optimizers.optimizer.state.0.exp_avg", "a.b.c", "a.b.c#2"} < set(tensors)
    assert tensors["a.b.c"].local.item() == 3
    assert tensors["a.b.c#2"].local.item() == -3


def test_a_name_that_looks_like_a_second_one_is_a_third() -> None:
    state = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "a.b#2": torch.tensor(3)}
    assert len(tree.split(state)[1]) == 3
    assert_equal(there_and_back(state), state)


def test_a_part_is_that_of_the_whole(tmp_path: Path) -> None:
    state = shared_state(3) | {"bare": torch.ones(2)}
    write_state(tmp_path, state)
    for name, part in state.items():
        assert_equal(archive.read_part(tmp_path, name), part)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.complex_numbers(allow_nan=False)
    | st.sets(st.integers() | st.text(max_size=2), max_size=2)
    | st.frozensets(st.integers() | st.text(max_size=2), max_size=2)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])])
    | st.sampled_from([np.float64(0.5), np.int64(3), np.float32(2), np.bool_(True), np.str_("a"), np.arange(3)])
    | st.builds(torch.tensor, st.lists(st.integers(-5, 5), max_size=3))
)
KEYS = st.sampled_from(["a", "b", "a.b", "a#2", ""]) | st.integers(0, 2)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(STATES)
def test_any_nesting_comes_back(state: Any) -> None:
    assert_equal(there_and_back(state), state)


def test_the_copy_shares_no_container_and_no_array_with_the_state() -> None:
    state = {"list": [1, {"x": 2}], "array": np.zeros(2)}
    copy = tree.rebuild(state, lambda _, tensor: tensor)
    state["list"][1]["x"] = 3  # type: ignore[index]
    state["array"][0] = 1  # type: ignore[index]
    assert copy["list"] == [1, {"x": 2}]
    assert copy["array"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"policy": {"window": collections.deque([1])}}, "can't hold policy.window: it is a collections.deque"),
        ({"points": [Point(1)]}, "can't hold points.0: it is a .*Point"),
        ({"color": Color.RED}, "can't hold color: it is a .*Color"),
        ({"path": Path("x")}, "can't hold path: it is a pathlib"),
        ({"f": print}, "can't hold f: it is a builtins.builtin_function_or_method"),
        ({"a": {Color.RED: 1}}, "can't hold a: it is a .*Color"),
        ({"o": np.array([print])}, "can't hold o: it is a numpy.ndarray"),
        ({"s": torch.eye(2).to_sparse()}, "can't hold s: it is a tensor of layout torch.sparse_coo"),
        ({"c": collections.Counter("ab")}, "can't hold c: it is a collections.Counter"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_could_not_be_read_back_is_refused_by_name(state: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tree.split(state)


def test_what_is_each_ranks_own_is_read_back_without_trust(tmp_path: Path) -> None:
    archive.write_own(tmp_path, 3, own_state(5, 3))
    assert_equal(archive.read_own(tmp_path, 3), own_state(5, 3))


def test_parameters_come_back_as_plain_tensors() -> None:
    back = there_and_back({"p": nn.Parameter(torch.ones(2))})
    assert type(back["p"]) is torch.Tensor
    assert not back["p"].requires_grad
