"""How the ranks divide the work of one model: the choices, their checks, what they do to the model before an optimizer
sees it, and the object that reduces its gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from safetrain.comm import Comm
from safetrain.errors import ConfigError, UsageError
from safetrain.reducing import Reduction
from safetrain.reduction import DDPReduction
from safetrain.single import SingleReduction

COMM_HOOKS = ("bf16", "fp16")
DTYPES = ("fp32", "bf16", "fp16")


class Strategy(Protocol):
    """What the loop asks of a strategy.

    Attributes:
        broadcast_buffers: before each synchronising forward, buffers are made equal to rank 0's.
        forward_communicates: the model's own forward issues collectives: all ranks must run each one.
        read_later: beginnings of the names of what is read of a checkpoint only when the model is there, because no
            rank is to hold the whole of it.
    """

    @property
    def broadcast_buffers(self) -> bool: ...
    @property
    def forward_communicates(self) -> bool: ...
    @property
    def read_later(self) -> Sequence[str]: ...

    def check_ranks(self, world_size: int) -> None:
        """
        Raises:
            ConfigError: it can't be had with so many ranks.
        """

    @abstractmethod
    def prepare(self, model: nn.Module, comm: Comm) -> nn.Module:
        """The model as it is to be looked at and wrapped.

        Raises:
            UsageError: this device can't do what was chosen.
        """

    @abstractmethod
    def reduce(self, model: nn.Module, comm: Comm) -> Reduction:
        """Wrap what ``prepare`` returned. Its parameters are from then on those that optimizers are given."""


@dataclass(frozen=True)
class DDPStrategy:
    """Data parallel: every rank has the whole model, gradients are averaged in buckets while backward runs.

    Attributes:
        bucket_cap_mb: size of a gradient bucket in MiB; the smaller, the earlier reduction starts, and the more calls.
            None: torch's choice, 1 MiB for the first, so that reduction starts early, and 25 MiB for the others.
        gradient_as_bucket_view: gradients live in the buckets: one copy less.
        broadcast_buffers: before each synchronising forward, buffers are made equal to rank 0's.
        static_graph: torch's optimisation for graphs that never change. It can't be completed: the vote comes first.
        comm_hook: compress gradients to ``bf16`` (GPUs only) or ``fp16`` on the wire; None: as they are.
        sync_batchnorm: turn BatchNorm into SyncBatchNorm (GPUs only). Its forward communicates: the vote comes first.
        forward_communicates: the model's own forward issues collectives: the vote comes first.
        compile: ``model.compile()``; names of parameters stay as they are.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    static_graph: bool = False
    comm_hook: str | None = None
    sync_batchnorm: bool = False
    forward_communicates: bool = False
    compile: bool = False

    read_later = ()

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise ConfigError(f"strategy.bucket_cap_mb={self.bucket_cap_mb}: must be above 0 (MiB)")
        if self.compile and self.bucket_cap_mb is not None and self.bucket_cap_mb < 1:
            raise ConfigError(
                f"strategy.compile=true and strategy.bucket_cap_mb={self.bucket_cap_mb}: torch splits a compiled graph "
                "at buckets of at least 1 MiB; set bucket_cap_mb to 1 or more, or null"
            )
        if self.comm_hook is not None and self.comm_hook not in COMM_HOOKS:
            raise ConfigError(f"strategy.comm_hook={self.comm_hook!r}: allowed are null, {', '.join(COMM_HOOKS)}")

    @property
    def votes_first(self) -> bool:
        """Whether a window's vote must come before its forward."""
        return self.static_graph or self.sync_batchnorm or self.forward_communicates

    def check_ranks(self, world_size: int) -> None:
        """Any number will do."""

    def prepare(self, model: nn.Module, comm: Comm) -> nn.Module:
        if comm.device.type == "cpu":
            if self.sync_batchnorm:
                raise UsageError("strategy.sync_batchnorm=true needs GPUs: torch has no SyncBatchNorm on the CPU")
            if self.comm_hook == "bf16":
                raise UsageError("strategy.comm_hook=bf16 needs GPUs (NCCL): on the CPU use fp16, or null")
        if self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group=comm.ddp_group)
        model = model.to(comm.device)
        if self.compile:
            model.compile()
        return model

    def reduce(self, model: nn.Module, comm: Comm) -> Reduction:
        return DDPReduction(model, comm, self)


@dataclass(frozen=True)
class FSDPStrategy:
    """Fully sharded data parallel (torch's FSDP2): each rank keeps a shard of every parameter, gradient and optimizer
    state, and gathers a block's parameters when that block runs. Forward communicates: the vote comes first.

    Attributes:
        shard: class names of the modules that are gathered as one, such as ``[Block]``; what is in none of them is
            gathered with the model. None: the modules in a ModuleList; where the model has none, those of at least a
            million parameters that are its children or in a Sequential (see sharding.blocks_of).
        replicas: whole copies of the model over all ranks (hybrid sharding). With one for each machine, parameters are
            gathered inside machines, and only gradients go between them.
        reshard_after_forward: give a block's gathered parameters back after its forward, and gather them again for
            backward. False: more memory, one gathering less.
        param_dtype: ``bf16`` or ``fp16``: gather and compute in it; the shards, and the optimizer, stay as they are.
        reduce_dtype: the same for the reduction of gradients. None: in ``param_dtype``.
        checkpoint_activations: compute a block's forward again in backward instead of keeping what it computed.
        broadcast_buffers: before each synchronising forward, buffers are made equal to rank 0's.
    """

    shard: Sequence[str] | None = None
    replicas: int = 1
    reshard_after_forward: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    checkpoint_activations: bool = False
    broadcast_buffers: bool = True

    forward_communicates = True
    read_later = ("model.", "optimizer/")

    def __post_init__(self) -> None:
        if isinstance(self.shard, str) or not all(isinstance(name, str) for name in self.shard or ()):
            raise ConfigError(f"strategy.shard={self.shard!r}: must be null or a list of class names, such as [Block]")
        if self.replicas < 1:
            raise ConfigError(f"strategy.replicas={self.replicas}: must be at least 1 (copies of the model)")
        for key in ("param_dtype", "reduce_dtype"):
            if (value := getattr(self, key)) not in (None, *DTYPES):
                raise ConfigError(f"strategy.{key}={value!r}: allowed are null, {', '.join(DTYPES)}")

    def check_ranks(self, world_size: int) -> None:
        if world_size % self.replicas:
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ConfigError(
                f"strategy.replicas={self.replicas}: {world_size} ranks can't be divided into that many equal groups. "
                f"Allowed here: {divisors}."
            )

    def prepare(self, model: nn.Module, comm: Comm) -> nn.Module:
        """As it is: it is moved to the device block by block, each of which is sharded before the next one comes."""
        return model

    def reduce(self, model: nn.Module, comm: Comm) -> Reduction:
        from safetrain.sharding import ShardedReduction  # torch.distributed.fsdp takes a second to import

        return ShardedReduction(model, comm, self)


@dataclass(frozen=True)
class SingleStrategy:
    """One process, and the same loop: nothing is wrapped, nothing is reduced.

    Attributes:
        compile: ``model.compile()``; names of parameters stay as they are.
    """

    compile: bool = False

    broadcast_buffers = True  # to nobody
    forward_communicates = False
    read_later = ()

    def check_ranks(self, world_size: int) -> None:
        if world_size > 1:
            raise ConfigError(
                f"strategy=single is for one rank, and {world_size} are asked for: set launch.nproc_per_node=1 "
                "launch.nnodes=1, or choose strategy=ddp or fsdp"
            )

    def prepare(self, model: nn.Module, comm: Comm) -> nn.Module:
        model = model.to(comm.device)
        if self.compile:
            model.compile()
        return model

    def reduce(self, model: nn.Module, comm: Comm) -> Reduction:
        return SingleReduction(model, comm)
