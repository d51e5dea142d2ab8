"""Which modules are gathered as one, and what their collectives are called."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from torch import nn

from safetrain import sharding
from safetrain.errors import UsageError
from safetrain.sharding import blocks_of
from safetrain.words import call_in_words


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.out = nn.Linear(width, width)

    def forward(self, x: object) -> object:
        return x


def stack() -> nn.Module:
    model = nn.Module()
    model.embed, model.layers, model.head = nn.Embedding(9, 4), nn.ModuleList([Layer(), Layer()]), nn.Linear(4, 9)
    return model


def test_modules_of_lists_the_inner_ones_first() -> None:
    assert list(blocks_of(stack(), None)) == [
        "layers.0.experts.0", "layers.0.experts.1", "layers.1.experts.0", "layers.1.experts.1", "layers.0", "layers.1",
    ]  # fmt: skip


def test_classes_that_were_chosen() -> None:
    assert list(blocks_of(stack(), ["Layer", "Embedding"])) == ["layers.0", "layers.1", "embed"]


def test_without_a_list_what_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 2)))
    assert list(blocks_of(model, None)) == []
    monkeypatch.setattr(sharding, "_LEAST_BLOCK", 100)
    assert list(blocks_of(model, None)) == ["2.0", "2"]


def test_a_shared_weight_is_left_to_what_holds_both() -> None:
    model = stack()
    model.head.weight = model.embed.weight  # type: ignore[union-attr]
    assert list(blocks_of(model, ["Layer", "Embedding"])) == ["layers.0", "layers.1"]


def test_a_list_itself_never_runs() -> None:
    assert list(blocks_of(stack(), ["ModuleList"])) == []


def test_a_class_that_the_model_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"no module of class Layre\. Did you mean Layer\? It has: Embedding, Layer, "):
        blocks_of(stack(), ["Layre"])


class Call(NamedTuple):
    op: str
    about: str
    group: str = "1"
    shapes: tuple[tuple[int, ...], ...] = ((72,),)
    dtype: str = "Float"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call("all_gather", "safetrain_ddp"), "all_gather of 72 floats (the model's shards)"),
        (Call("all_gather", "safetrain_shard"), "all_gather of 72 floats (the model's shards)"),
        (Call("reduce_scatter", "safetrain_shard"), "reduce_scatter of 72 floats (the gradients)"),
        (Call("all_reduce", "safetrain_replicate"), "all_reduce of 72 floats (the gradients)"),
        (Call("all_gather", "mine"), "all_gather of 72 floats (group mine)"),
    ],
)
def test_what_a_rank_waits_in(call: Call, words: str) -> None:
    assert call_in_words(call) == words
