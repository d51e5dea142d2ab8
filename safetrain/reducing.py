"""What a window asks of the object that makes all ranks' gradients one, and what does not depend on how that is done.

There is one for each strategy: reduction.py averages replicas with DDP, sharding.py keeps a shard of the model on each
rank, single.py has nobody to average with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from safetrain.ballot import BallotBox, Tally, Vote
from safetrain.comm import Comm
from safetrain.layout import BufferGuard, ParameterLayout
from safetrain.tree import on_cpu

T = TypeVar("T")
CONTROL_GROUP_BITS = 20  # int64 words have room for any limb; this keeps the squares small


class Reduction(ABC):
    """One rank's side of the gradient reduction of a model.

    Attributes:
        votes_first: whether a window's vote must come before its forward.
    """

    def __init__(self, model: nn.Module, comm: Comm, *, votes_first: bool, bits: int = CONTROL_GROUP_BITS) -> None:
        self.model, self.votes_first = model, votes_first
        self._comm = comm
        self._box = BallotBox(comm.rank, comm.world_size, bits=bits)

    def _note_layout(self) -> None:
        """What trains, and which buffers there are, from now on."""
        self._layout = ParameterLayout(self.model)
        self._layout.check_same_on_all_ranks(self._comm)
        self._buffers = BufferGuard(self.model)
        self._buffers.note()
        self._parameters = [parameter for _, parameter in self._layout.trained]
        self._unused: list[bool] = []
        self._compared_unused: list[bool] = []
        self._unused_everywhere: list[bool] = []

    # --- one window -------------------------------------------------------------------------------------------------

    def layout_change(self, *, walk: bool = False) -> str | None:
        """What the reduction does not know of this rank's model; None: it knows all. ``walk`` also looks for new
        modules.

        Raises:
            UsageError: a parameter was converted or moved for good.
        """
        return self._layout.change() or (self._layout.growth(self.model) if walk else None)

    def convert_back(self) -> None:
        """Undo a conversion of the model, for the window in which this rank says that it fails."""
        self._layout.convert_back()
        self._buffers.restore()

    def announce_layout(self, vote: Vote, accumulate: int) -> Tally:
        """An empty window on the old wrap, which tells the ranks that this one's parameters have changed."""
        self.open_window()
        if self.votes_first:
            return self.vote_first(vote)
        for index in range(accumulate):
            self.forward(lambda: None, first=index == 0, last=index == accumulate - 1)
        self.unused()
        return self.complete(vote)

    @abstractmethod
    def rewrap(self) -> None:
        """Follow a change of the layout, on all ranks at the same boundary.

        Raises:
            UsageError: it is of a kind that can't be followed.
        """

    def open_window(self) -> None:
        """Gradients to None, buffers remembered."""
        self.drop_gradients()
        self._buffers.note()

    @abstractmethod
    def forward(self, run: Callable[[], T], *, last: bool, first: bool) -> T:
        """One micro-batch's forward round ``run``, which must not raise where the vote comes after it; gradients are
        reduced in the last one."""

    def backward_inputs(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """What autograd is to compute gradients for, where only ``parameters`` learn; None: all."""
        return parameters

    def holds_gradients(self) -> bool:
        """Whether some parameter has a gradient already."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def unused(self, among: Sequence[torch.Tensor] | None = None) -> list[str]:
        """Names of the parameters that got no gradient on this rank in this window (of those in ``among``)."""
        self._unused = self._without_gradient()
        if not any(self._unused):
            return []
        wanted = None if among is None else {id(parameter) for parameter in among}
        return [
            name
            for (name, parameter), unused in zip(self._layout.trained, self._unused, strict=True)
            if unused and (wanted is None or id(parameter) in wanted)
        ]

    def _without_gradient(self) -> list[bool]:
        """Of each trained parameter, whether this rank's own batches gave it none."""
        return [parameter.grad is None for parameter in self._parameters]

    @abstractmethod
    def complete(self, vote: Vote) -> Tally:
        """End the reduction on this rank and return what all ranks voted.

        ``unused`` must have been called before. Raises CommunicationError where the ranks' reductions do not fit
        together.
        """

    def vote_first(self, vote: Vote) -> Tally:
        """The vote alone, before any forward."""
        counted = torch.tensor(self._box.encode(vote), dtype=torch.float64)
        self._comm.start_sum(counted).wait()
        tally = self._box.decode((counted / self._comm.world_size).tolist())
        return tally._replace(same_log_keys=False)  # what this window logs comes after the vote

    @abstractmethod
    def finish_voted(self, tally: Tally) -> Tally:
        """End the reduction of a window whose vote came first; only now can the tally tell which ranks completed it."""

    def _completion(self) -> tuple[bool, bool]:
        """Whether this rank completes what its batches left out, and whether that is new since lists were compared."""
        completed = any(self._unused)
        return completed, completed and self._unused != self._compared_unused

    def explain(self, error: Exception) -> Exception:
        """An error of a user's forward or backward in his terms; any other error as it is."""
        return error

    # --- after the vote ---------------------------------------------------------------------------------------------

    def drop_unused_everywhere(self, tally: Tally) -> None:
        """``grad = None`` for parameters that no rank used: a zero would still let momentum and weight decay move them.

        The ranks compare their lists only when each of them completed something, and some list is new.
        """
        if tally.completed < tally.world_size:
            return
        if tally.unused_changed:
            users = self._comm.sum_vector([not unused for unused in self._unused])
            self._unused_everywhere = [count == 0 for count in users]
            self._compared_unused = self._unused
        for parameter, nowhere in zip(self._parameters, self._unused_everywhere, strict=True):
            if nowhere:
                parameter.grad = None

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm over all elements of ``gradients``, the same on all ranks."""
        return nn.utils.get_total_norm(gradients)

    def place(self, name: str, empty: torch.Tensor) -> torch.Tensor:
        """Where on this rank what a checkpoint has under ``name`` is read to: the whole of it, or this rank's shard."""
        return on_cpu(name, empty)

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def discard(self) -> None:
        """Leave no trace of this window on this rank."""
        self.drop_gradients()
        self._buffers.restore()

    def restore_buffers_unless(self, keep: torch.Tensor) -> None:
        """``restore_buffers`` where ``keep`` (a boolean on the device) is false, without asking the host."""
        self._buffers.restore_unless(keep)

    def restore_buffers(self) -> None:
        """Buffers as they were when the window was opened."""
        self._buffers.restore()

    def share_buffers(self) -> None:
        """Make all buffers equal to rank 0's, to evaluate and at the end: in a healthy run they differ by rank."""
        self._comm.broadcast_tensors(list(self.model.buffers()))
