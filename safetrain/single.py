"""The reduction of a world of one: there is nobody to average with, so nothing is wrapped and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from safetrain.ballot import Tally, Vote, exact_bits
from safetrain.comm import Comm
from safetrain.reducing import Reduction

T = TypeVar("T")


class SingleReduction(Reduction):
    """The same window as with more ranks. A parameter without a gradient keeps ``None``, so nothing is completed."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        super().__init__(model, comm, votes_first=False, bits=exact_bits(1))
        self._note_layout()

    def rewrap(self) -> None:
        self.drop_gradients()
        self._note_layout()

    def forward(self, run: Callable[[], T], *, last: bool, first: bool) -> T:
        with torch.enable_grad():  # as under the other strategies
            return run()

    def complete(self, vote: Vote) -> Tally:
        return self._box.decode(self._box.encode(vote))

    def finish_voted(self, tally: Tally) -> Tally:
        return tally
