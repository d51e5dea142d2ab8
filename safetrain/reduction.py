"""Ideas 1 and 2: the DDP wrap, and the backward of its own with which every rank ends the reduction itself.

DDP waits until each trainable parameter has had a gradient on each rank. After the user's backward, however it went,
``complete`` fires what has not fired: the ballot, and a zero gradient for each parameter that got none. The ballot is
never part of the user's loss, so something is always left to fire, even where backward broke after the last parameter.
"""

from __future__ import annotations

import inspect
import re
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from safetrain.ballot import Tally, Vote, exact_bits, fits_in_gradients
from safetrain.buckets import cap_with_room
from safetrain.comm import Comm
from safetrain.errors import UsageError
from safetrain.reducing import CONTROL_GROUP_BITS, Reduction

if TYPE_CHECKING:
    from safetrain.strategy import DDPStrategy

T = TypeVar("T")
_COMM_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


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


class DDPReduction(Reduction):
    """Every rank has the whole model, and DDP averages the gradients."""

    def __init__(self, model: nn.Module, comm: Comm, strategy: DDPStrategy) -> None:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise UsageError(
                "the model is already wrapped in DistributedDataParallel: give the bare model, safetrain wraps it"
            )
        self._strategy = strategy
        votes_first = strategy.votes_first or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
        self._rides = (
            comm.device.type == "cpu"
            and strategy.comm_hook is None
            and not votes_first
            and fits_in_gradients(comm.world_size)
        )
        bits = exact_bits(comm.world_size) if self._rides else CONTROL_GROUP_BITS
        super().__init__(model, comm, votes_first=votes_first, bits=bits)
        self._wrap()

    def _wrap(self) -> None:
        self._note_layout()
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
        self._before_last: list[tuple[torch.Tensor | None, int]] | None = None

    def _bucket_cap_mb(self) -> float | None:
        if not self._rides:
            return self._strategy.bucket_cap_mb
        with_ballot = [p.nbytes for _, p in reversed(self._layout.trained) if p.dtype is self._ballot.dtype]
        return cap_with_room(with_ballot, self._strategy.bucket_cap_mb)

    def time_buckets(self, timed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Reduce each bucket by ``timed`` of what reduces it; before the first window, and not with a comm_hook."""
        self._ddp.register_comm_hook(self._comm.ddp_group, timed(default_hooks.allreduce_hook))

    # --- one window -------------------------------------------------------------------------------------------------

    def rewrap(self) -> None:
        """Build DDP anew, on all ranks at the same boundary."""
        self.drop_gradients()
        del self._ddp, self._step_module
        self._wrap()

    def open_window(self) -> None:
        super().open_window()
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

    def complete(self, vote: Vote) -> Tally:
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

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._ballot.grad = None


def _buffer_argument(broadcast_buffers: bool) -> dict[str, Any]:
    """DDP's argument for not synchronising buffers before forward; torch renamed it in 2.13."""
    if broadcast_buffers:
        return {}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
