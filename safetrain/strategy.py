"""How a model is reduced: the choices, their checks, and what they do to the model before it is wrapped."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from safetrain.comm import Comm
from safetrain.errors import ConfigError, UsageError

COMM_HOOKS = ("bf16", "fp16")


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

    def prepare(self, model: nn.Module, comm: Comm) -> nn.Module:
        """The model as it is to be wrapped and given to the optimizers, on its device.

        Raises:
            UsageError: this device can't do what was chosen.
        """
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
