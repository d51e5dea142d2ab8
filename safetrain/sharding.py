"""A shard of the model on each rank: torch's FSDP2, and what idea 5 needs round it.

Each *block* (a module that is gathered as one) gathers its parameters when it runs, in forward and again in backward,
and its gradients are averaged and cut to shards behind it. So every rank has to run the same blocks in the same order:
what a rank left out could not be completed. After backward the ranks compare that order; a parameter that a block has
but did not use counts as zero, as under DDP.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from safetrain.ballot import Tally, Vote
from safetrain.checks import nearest
from safetrain.comm import Comm
from safetrain.errors import RanksDiffer, UsageError, together
from safetrain.pieces import is_shard
from safetrain.reducing import Reduction

if TYPE_CHECKING:
    from safetrain.strategy import FSDPStrategy

T = TypeVar("T")
_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# names in a checkpoint: of a weight, and of what an optimizer keeps for it (see resume.state_of, OptimizerState)
_OF_A_PARAMETER = re.compile(r"model\.(?P<weight>.+)|optimizer/.*?\.state\.(?P<kept>.+)\.[^.]+")
_FINGERPRINT_BITS = 20  # its square, summed over thousands of ranks, is exact in float64
_LEAST_BLOCK = 1 << 20  # parameters: gathering fewer costs more in calls than it saves in memory
# what torch says where a shard meets a whole tensor
_NOT_GATHERED = ("mixed torch.Tensor and DTensor",)


class ShardedReduction(Reduction):
    """Every rank has a shard of each parameter, and FSDP2 reduces the gradients to shards."""

    def __init__(self, model: nn.Module, comm: Comm, strategy: FSDPStrategy) -> None:
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UsageError(f"strategy=fsdp needs torch 2.13 or newer, and this is {torch.__version__}")
        if wrapped := next((name for name in map(_wrapper, model.modules()) if name), None):
            raise UsageError(
                f"the model is already wrapped ({wrapped}): give the bare model, safetrain shards it. One that an "
                "earlier fit() has sharded stays so: let build_model make a new one."
            )
        if empty := next((name for name, p in model.named_parameters() if p.is_meta), None):
            raise UsageError(f"{empty} is on the meta device and has no values: build the model on the CPU")
        super().__init__(model, comm, votes_first=True)
        self._strategy = strategy
        self._step = 0
        self._ran: list[str] = []  # blocks, in this window
        self._used: set[int] = set()  # trained parameters that have had a gradient from this rank's batches
        self._hooks: list[RemovableHandle] = []
        self._note_layout()
        self._shard(blocks_of(model, strategy.shard))
        self._sharded = dict(model.named_parameters())
        self._gathered = self._gather_once()
        self._follow_gradients()

    def _shard(self, blocks: dict[str, nn.Module]) -> None:
        """Bottom up, so that no more than one block is whole on the device at a time."""
        strategy, comm = self._strategy, self._comm
        mesh = comm.mesh(strategy.replicas)
        param_dtype, reduce_dtype = _DTYPES[strategy.param_dtype], _DTYPES[strategy.reduce_dtype]
        mixed = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        self._blocks: dict[str, FSDPModule] = {}
        for name, block in {**blocks, "": self.model}.items():
            block.to(comm.device)
            comm.broadcast_tensors([t.detach() for t in (*block.parameters(), *block.buffers()) if not is_shard(t)])
            if strategy.checkpoint_activations and name:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            # False for the model itself, whose backward begins at once; see _reshard_unless_training
            reshards = strategy.reshard_after_forward and bool(name)
            self._blocks[name] = sharded = fully_shard(
                block, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshards
            )
            sharded.register_forward_pre_hook(functools.partial(self._note_run, name))  # type: ignore[attr-defined]
            sharded.register_forward_hook(_reshard_unless_training)  # type: ignore[attr-defined]
        self._root = self._blocks[""]
        self._root.set_reduce_scatter_unused_params(True)  # or ranks that use other parameters reduce other tensors

    def _gather_once(self) -> dict[str, nn.Parameter]:
        """The gathered parameters by name: what autograd sees. They are the same objects each time that their block is
        gathered."""
        gathered: dict[str, nn.Parameter] = {}
        for name, block in self._blocks.items():
            block.unshard()
            own = block.named_parameters(prefix=name)  # type: ignore[attr-defined]
            gathered.update((key, p) for key, p in own if not is_shard(p))
            block.reshard()
        return gathered

    def _follow_gradients(self) -> None:
        """Note which parameters get a gradient from this rank's own batches: after the reduction all have one."""
        self._note_layout()
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self._gathered[name].register_post_accumulate_grad_hook(functools.partial(_add, self._used, index))
            for index, (name, _) in enumerate(self._layout.trained)
        ]

    def _note_run(self, name: str, _block: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._ran.append(name)

    # --- one window -------------------------------------------------------------------------------------------------

    def layout_change(self, *, walk: bool = False) -> str | None:
        self._layout.check_kinds()  # a shard has no address by which a conversion is seen
        return super().layout_change(walk=walk)

    def convert_back(self) -> None:
        self._buffers.restore()  # the vote comes first: this rank has no forward to take part in

    def rewrap(self) -> None:
        """Parameters were frozen or unfrozen: say so to the gathered ones."""
        replaced = self._layout.replaced()
        if replaced or self._layout.growth(self.model):
            raise UsageError(
                f"{replaced or self._layout.growth(self.model)}: under strategy=fsdp parameters can be frozen and "
                "unfrozen, but neither replaced nor added once training has begun. Do it in build_model."
            )
        self.drop_gradients()
        for name, parameter in self.model.named_parameters():
            self._gathered[name].requires_grad_(parameter.requires_grad)
        self._used.clear()
        self._follow_gradients()

    def open_window(self) -> None:
        super().open_window()
        self._ran.clear()
        self._used.clear()

    def vote_first(self, vote: Vote) -> Tally:
        self._step = vote.step
        return super().vote_first(vote)

    def forward(self, run: Callable[[], T], *, last: bool, first: bool) -> T:
        """One micro-batch's forward round ``run``; until the last one gradients stay whole, on this rank."""
        if last and self._strategy.broadcast_buffers:
            self.share_buffers()
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        with torch.enable_grad():
            return run()

    def backward_inputs(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """All: autograd does not see shards. The gradients of the others are dropped with the window."""
        return None

    def holds_gradients(self) -> bool:
        return bool(self._used)

    def _without_gradient(self) -> list[bool]:
        return [index not in self._used for index in range(len(self._parameters))]

    def complete(self, vote: Vote) -> Tally:
        raise AssertionError("where forward communicates, the vote comes first")

    def finish_voted(self, tally: Tally) -> Tally:
        """What ranks completed, and whether they all ran the same blocks.

        Raises:
            RanksDiffer: they did not, so that gradients are of other blocks' parameters.
        """
        order = zlib.crc32("\0".join(self._ran).encode()) >> (32 - _FINGERPRINT_BITS)
        *counts, orders, squares = self._comm.sum_vector([*self._completion(), order, order * order])
        if tally.world_size * squares != orders * orders:
            self._tell_order()
        return tally._replace(completed=round(counts[0]), unused_changed=round(counts[1]))

    def _tell_order(self) -> None:
        ran = self._comm.gather(self._ran)
        other = next(rank for rank, theirs in enumerate(ran) if theirs != ran[0])
        at = next((i for i, (a, b) in enumerate(zip(ran[0], ran[other], strict=False)) if a != b), -1)
        at = min(len(ran[0]), len(ran[other])) if at < 0 else at
        rank_0, rank_n = (_block_in_words(of_rank, at) for of_rank in (ran[0], ran[other]))
        raise together(
            RanksDiffer(
                f"the ranks ran different blocks of the model: block {at + 1} of this step was {rank_0} on rank 0 and "
                f"{rank_n} on rank {other}. Under strategy=fsdp a block that runs gathers its parameters from all "
                "ranks, so every rank must run the same ones in the same order: no choice between blocks by a rank's "
                "own data. Put the choice inside one block (strategy.shard).",
                step=self._step,
            )
        )

    def explain(self, error: Exception) -> Exception:
        """What torch raises where a shard is used as if it were the parameter, in the user's terms."""
        if not any(text in str(error) for text in _NOT_GATHERED):
            return error
        explained = UsageError(
            f"a parameter was used outside of its block's forward ({str(error).partition(chr(10))[0]}). Under "
            "strategy=fsdp a rank holds a shard of it, which is gathered only while the block runs: call "
            "self.model(...), not methods of its parts, or choose other blocks (strategy.shard)."
        )
        explained.__cause__ = error
        return explained.with_traceback(error.__traceback__)

    # --- after the vote ---------------------------------------------------------------------------------------------

    def total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        norm = super().total_norm(gradients)
        return norm.full_tensor() if is_shard(norm) else norm  # type: ignore[attr-defined]

    def place(self, name: str, empty: torch.Tensor) -> torch.Tensor:
        """Weights, and what an optimizer keeps of a weight's shape, are read in shards like the weight's."""
        found = _OF_A_PARAMETER.fullmatch(name)
        parameter = None if found is None else self._sharded.get(found["weight"] or found["kept"])
        if parameter is None or parameter.shape != empty.shape:
            return super().place(name, empty)
        return torch.empty_like(parameter.detach(), dtype=empty.dtype)


def blocks_of(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """The modules to gather as one, by name, each before those that hold it.

    ``names`` of classes; None: the modules in each ModuleList. Where there is none, those in a Sequential, and the
    model's children, that are worth a collective of their own. What shares a parameter with a module outside of it is
    left to that which holds both.

    Raises:
        UsageError: the model has no module of one of these classes; with the nearest that it has.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in modules}
    if names is not None:
        classes = {type(module).__name__ for module in modules.values()}
        for name in names:
            if name not in classes:
                raise UsageError(
                    f"strategy.shard: the model has no module of class {name}.{nearest(name, classes)} It has: "
                    f"{', '.join(sorted(classes))}."
                )
        found = [name for name, module in modules.items() if type(module).__name__ in names]
    else:
        found = [name for name in modules if isinstance(parents[name], nn.ModuleList)] or [
            name
            for name, module in modules.items()
            if (parents[name] is model or isinstance(parents[name], nn.Sequential)) and _size(module) >= _LEAST_BLOCK
        ]
    return {
        name: modules[name]
        for name in sorted(found, key=lambda name: -name.count("."))
        if type(modules[name]).forward is not nn.Module.forward and _keeps_to_itself(modules[name], model)
    }


def _wrapper(module: nn.Module) -> str:
    kinds = [kind.__name__ for kind in type(module).__mro__]
    return next((kind for kind in ("FSDPModule", "DistributedDataParallel") if kind in kinds), "")


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _keeps_to_itself(block: nn.Module, model: nn.Module) -> bool:
    """Whether it has parameters, and shares none of them with a module outside of it."""
    inside = set(block.modules())
    others = {id(p) for m in model.modules() if m not in inside for p in m.parameters(recurse=False)}
    mine = [id(p) for p in block.parameters()]
    return bool(mine) and others.isdisjoint(mine)


def _reshard_unless_training(block: nn.Module, _inputs: Any, _output: Any) -> None:
    """No backward will follow that gives the parameters back."""
    if not torch.is_grad_enabled():
        block.reshard()  # type: ignore[operator]


def _add(used: set[int], index: int, _parameter: torch.Tensor) -> None:
    used.add(index)


def _block_in_words(ran: Sequence[str], at: int) -> str:
    return (ran[at] or "the model") if at < len(ran) else "none"
