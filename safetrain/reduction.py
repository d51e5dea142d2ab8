"""Ideas 1 and 2: the DDP wrap, and the backward of its own with which every rank ends the reduction itself.

DDP waits until each trainable parameter has had a gradient on each rank. After the user's backward, however it went,
``complete`` fires what has not fired: the ballot, and a zero gradient for each parameter that got none. The ballot is
never part of the user's loss, so something is always left to fire, even where backward broke after the last parameter.
"""

from __future__ import annotations

import inspect
import re
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from safetrain.ballot import BallotBox, Tally, Vote, exact_bits, fits_in_gradients
from safetrain.buckets import cap_with_room
from safetrain.comm import Comm
from safetrain.errors import UsageError
from safetrain.layout import BufferGuard, ParameterLayout
from safetrain.strategy import DDPStrategy

T = TypeVar("T")
_COMM_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
_CONTROL_GROUP_BITS = 20  # int64 words have room for any limb; this keeps the squares small


class StepModule(nn.Module):
    """What DDP wraps: the user's model, and the ballot. Its forward runs the user's step, whatever that calls."""

    def __init__(self, model: nn.Module, words: int, device: torch.device) -> None:
        super().__init__()
        # registered first: DDP fills buckets from the last parameter to the first, so this one ends the last bucket
        self.ballot = nn.Parameter(torch.zeros(words, dtype=torch.float32, device=device))
        self.model = model

    def forward(self, run: Callable[[], T]) -> T:
        # user code that leaves gradients switched off would make DDP skip its preparation for backward on this rank
        with torch.enable_grad():
            return run()


class Reduction:
    """One rank's side of the gradient reduction of a model."""

    def __init__(self, model: nn.Module, comm: Comm, strategy: DDPStrategy) -> None:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise UsageError(
                "the model is already wrapped in DistributedDataParallel: give the bare model, safetrain wraps it"
            )
        self.model, self._comm, self._strategy = model, comm, strategy
        self.votes_first = strategy.votes_first or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
        self._rides = (
            comm.device.type == "cpu"
            and strategy.comm_hook is None
            and not self.votes_first
            and fits_in_gradients(comm.world_size)
        )
        bits = exact_bits(comm.world_size) if self._rides else _CONTROL_GROUP_BITS
        self._box = BallotBox(comm.rank, comm.world_size, bits=bits)
        self._wrap()

    def _wrap(self) -> None:
        self._layout = ParameterLayout(self.model)
        self._layout.check_same_on_all_ranks(self._comm)
        self._buffers = BufferGuard(self.model)
        self._buffers.note()
        self._step_module = StepModule(self.model, self._box.words if self._rides else 2, self._comm.device)
        self._ballot = self._step_module.ballot
        self._ballot_edge = get_gradient_edge(self._ballot)
        strategy, device = self._strategy, self._comm.device
        self._ddp = DistributedDataParallel(
            self._step_module,
            device_ids=None if device.type == "cpu" else [device.index],
            process_group=self._comm.ddp_group,
            bucket_cap_mb=self._bucket_cap_mb(),  # torch takes any number
            gradient_as_bucket_view=strategy.gradient_as_bucket_view,
            static_graph=strategy.static_graph,
            **_buffer_argument(strategy.broadcast_buffers),
        )
        if strategy.comm_hook is not None:
            self._ddp.register_comm_hook(self._comm.ddp_group, _COMM_HOOKS[strategy.comm_hook])
        self._parameters = [parameter for _, parameter in self._layout.trained]
        self._before_last: list[tuple[torch.Tensor | None, int]] | None = None
        self._unused: list[bool] = []
        self._compared_unused: list[bool] = []
        self._unused_everywhere: list[bool] = []

    def _bucket_cap_mb(self) -> float | None:
        if not self._rides:
            return self._strategy.bucket_cap_mb
        with_ballot = [p.nbytes for _, p in reversed(self._layout.trained) if p.dtype is self._ballot.dtype]
        return cap_with_room(with_ballot, self._strategy.bucket_cap_mb)

    # --- one window -------------------------------------------------------------------------------------------------

    def layout_change(self, *, walk: bool = False) -> str | None:
        """What DDP does not know of this rank's model; None: it knows all. ``walk`` also looks for new modules.

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

    def rewrap(self) -> None:
        """Build DDP anew, on all ranks at the same boundary."""
        self.drop_gradients()
        del self._ddp, self._step_module
        self._wrap()

    def open_window(self) -> None:
        """Gradients to None, buffers remembered."""
        self.drop_gradients()
        self._buffers.note()
        self._before_last = None

    def forward(self, run: Callable[[], T], *, last: bool, first: bool) -> T:
        """One micro-batch's DDP forward round ``run``, which must not raise; gradients are reduced in the last one.

        A loss that ``run`` returns comes back with a node of DDP's in its graph where the graph is static: without it
        nothing starts the reduction of the first window.
        """
        # torch 2.13 counts a static graph's gradients wrongly under no_sync (it asserts in the first window, and would
        # not reduce from the second on): there every micro-batch is reduced, with the same result
        with nullcontext() if last or self._strategy.static_graph else self._ddp.no_sync():
            returned: T = self._ddp(run)
        if last and not first:
            self._before_last = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self._parameters]
        return returned

    def holds_gradients(self) -> bool:
        """Whether some parameter has a gradient already."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def unused(self, among: Sequence[torch.Tensor] | None = None) -> list[str]:
        """Names of the parameters that got no gradient on this rank in this window (of those in ``among``)."""
        self._unused = [parameter.grad is None for parameter in self._parameters]
        if not any(self._unused):
            return []
        wanted = None if among is None else {id(parameter) for parameter in among}
        return [
            name
            for (name, parameter), unused in zip(self._layout.trained, self._unused, strict=True)
            if unused and (wanted is None or id(parameter) in wanted)
        ]

    def complete(self, vote: Vote) -> Tally:
        """End the reduction on this rank and return what all ranks voted.

        ``unused`` must have been called before. Raises CommunicationError where the ranks' reductions do not fit
        together.
        """
        vote.completed, vote.unused_changed = self._completion()
        words = self._box.encode(vote)
        if self._rides:
            self._fire(torch.frombuffer(array("f", words), dtype=torch.float32))  # 2 µs; torch.tensor(words) takes 7
            assert self._ballot.grad is not None
            return self._box.decode(self._ballot.grad.tolist())
        counted = torch.tensor(words, dtype=torch.float64)
        work = self._comm.start_sum(counted)
        self._fire(torch.zeros_like(self._ballot))
        work.wait()
        return self._box.decode((counted / self._comm.world_size).tolist())

    def vote_first(self, vote: Vote) -> Tally:
        """The vote alone, before any forward."""
        counted = torch.tensor(self._box.encode(vote), dtype=torch.float64)
        self._comm.start_sum(counted).wait()
        tally = self._box.decode((counted / self._comm.world_size).tolist())
        return tally._replace(same_log_keys=False)  # what this window logs comes after the vote

    def finish_voted(self, tally: Tally) -> Tally:
        """End the reduction of a window whose vote came first; only now can the tally tell which ranks completed it.

        A static graph is completed by DDP itself, which leaves the parameters alone that no rank used.
        """
        if self._strategy.static_graph:
            return tally
        self._fire(torch.tensor(self._completion(), dtype=torch.float32))
        assert self._ballot.grad is not None
        counts = [round(average * tally.world_size) for average in self._ballot.grad.tolist()]
        return tally._replace(completed=counts[0], unused_changed=counts[1])

    def _completion(self) -> tuple[bool, bool]:
        """Whether this rank completes what its batches left out, and whether that is new since lists were compared."""
        completed = any(self._unused)
        return completed, completed and self._unused != self._compared_unused

    def explain(self, error: Exception) -> Exception:
        """What DDP raises inside a user's backward, in the user's terms; any other error as it is."""
        twice = re.search(r"Parameter at index (\d+).*marked as ready twice", str(error), re.DOTALL)
        if twice is None:
            return error
        name, _ = self._layout.trained[int(twice[1]) - 1]  # DDP's parameter 0 is the ballot
        explained = UsageError(
            f"{name} had a second gradient in one backward, which DDP can't reduce. A reentrant checkpoint round a "
            "layer that is used more than once does that: use checkpoint(..., use_reentrant=False)."
        )
        explained.__cause__ = error
        return explained.with_traceback(error.__traceback__)

    def _fire(self, words: torch.Tensor) -> None:
        """Give the ballot its words, and a zero gradient to every parameter whose DDP hook has not fired.

        The gradients go in at the graph nodes that DDP hooked at the wrap: these fire also where user code has frozen
        the parameter meanwhile, or converted it to and fro and so given it a new node.
        """
        missing = self._not_fired()
        # torch.autograd.backward would check shapes and dtypes first: as much again as the backward itself
        torch.autograd.Variable._execution_engine.run_backward(
            (self._ballot_edge, *(self._layout.edges[i] for i in missing)),
            (words, *(torch.zeros_like(self._parameters[i]) for i in missing)),
            keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip

    def _not_fired(self) -> list[int]:
        """Indices of the parameters without a gradient from the synchronising micro-batch.

        With one micro-batch a window: those without any. With more: those whose gradient is the same tensor,
        unmodified, as before the last backward (``_version`` counts in-place changes; a scan costs 0.1 µs a parameter,
        a hook 0.8 µs).
        """
        if self._before_last is None:
            return [i for i, unused in enumerate(self._unused) if unused]
        return [
            i
            for i, (parameter, (gradient, version)) in enumerate(zip(self._parameters, self._before_last, strict=True))
            if parameter.grad is None or (parameter.grad is gradient and gradient._version == version)
        ]

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

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._ballot.grad = None

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
        """Make all buffers equal to rank 0's, to evaluate and at the end: in a healthy DDP run they differ by rank."""
        self._comm.broadcast_tensors(list(self.model.buffers()))


def _buffer_argument(broadcast_buffers: bool) -> dict[str, Any]:
    """DDP's argument for not synchronising buffers before forward; torch renamed it in 2.13."""
    if broadcast_buffers:
        return {}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
