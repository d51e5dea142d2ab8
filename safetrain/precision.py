"""Number formats, and the order of an optimizer step: scale → backward → unscale → weigh → clip → step → update.

Gradients are clipped after unscaling, on every rank alike (where ranks hold whole ones these are equal already, and
clipping communicates nothing). A window that the ranks dropped never reaches the scaler, so ``unscale_`` is never left
without its ``update``.

A gradient that is not finite must not be stepped on. On the CPU the host looks, and decides. On a GPU looking would
wait for the whole backward, so fused optimizers leave the step out by themselves, and the host reads it a window later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from safetrain.errors import ConfigError


@dataclass(frozen=True)
class Clip:
    """How far gradients may go: by their norm over all of an optimizer's parameters, by value, or not at all."""

    norm: float | None = None
    value: float | None = None


class Applied:
    """What became of the gradients of one window. Of a step left out on the device, the host learns a little later."""

    def __init__(self, grad_norm: torch.Tensor, scaler: torch.amp.GradScaler | None, *, on_device: bool) -> None:
        self.grad_norm = grad_norm
        self._scaler = scaler
        self._copied: torch.cuda.Event | None = None
        if not on_device:
            self._host: torch.Tensor | bool = math.isfinite(float(grad_norm))
            return
        self.finite_on_device = self._host = torch.isfinite(grad_norm)
        if grad_norm.is_cuda:
            self._host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(
                grad_norm.isfinite(), non_blocking=True
            )
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def finite(self) -> bool:
        """Whether the step was taken. Waits for the device only as far as the gradient norm of this window."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._host)

    @property
    def scale_coming_down(self) -> bool:
        """Whether a loss scale that is still being searched for explains an overflow. Reads the scale."""
        return self._scaler is not None and self._scaler.get_scale() >= 1.0


class Precision:
    """fp32, and the interface of the others."""

    dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None

    def prepare(self, device: torch.device) -> None:
        """Bind to the rank's device; called once, before training."""
        self._device = device

    def autocast(self) -> AbstractContextManager[object]:
        """The context for user code."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it goes into backward."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def skips_on_device(self, optimizers: Iterable[Optimizer]) -> bool:
        """Whether ``step`` leaves a bad window out without asking the host: on a GPU, with fused optimizers."""
        return self._device.type == "cuda" and all(optimizer.defaults.get("fused") for optimizer in optimizers)

    def step(
        self,
        optimizers: Sequence[Optimizer],
        clip: Clip,
        factor: float,
        total_norm: Callable[[Sequence[torch.Tensor]], torch.Tensor] = nn.utils.get_total_norm,
    ) -> Applied:
        """One step of every optimizer, or of none where a gradient is not finite (they are equal on all ranks).

        ``factor`` makes the reduced gradients the exact weighted mean; 1.0 as a rule, and then nothing is multiplied.
        ``total_norm``: of gradients, of which a rank may have shards; the same on all ranks.
        """
        norms = [self._make_ready(optimizer, clip, factor, total_norm) for optimizer in optimizers]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        on_device = self.skips_on_device(optimizers)
        applied = Applied(norm, self.scaler, on_device=on_device)
        if on_device or applied.finite:
            for optimizer in optimizers:
                if self.scaler is not None:
                    self.scaler.step(optimizer)  # knows of the overflow by itself
                elif on_device:
                    _step_if(optimizer, applied.finite_on_device)
                else:
                    optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        return applied

    def _make_ready(
        self,
        optimizer: Optimizer,
        clip: Clip,
        factor: float,
        total_norm: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        """Unscale, weigh, clip; the norm before the clip."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        norm = total_norm(gradients)
        if clip.norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, clip.norm, norm)
        if clip.value is not None:
            nn.utils.clip_grad_value_(parameters, clip.value)
        return norm


def _step_if(optimizer: Optimizer, finite: torch.Tensor) -> None:
    """A fused optimizer's step, left out on the device where ``finite`` is false: the hooks that GradScaler uses."""
    optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


class FP32(Precision):
    """Single precision throughout."""


class BF16(Precision):
    """Autocast to bfloat16; parameters and gradients stay fp32. Needs no loss scale: the exponent is fp32's."""

    dtype = torch.bfloat16


class FP16(Precision):
    """Autocast to float16 with a loss scale: halved on overflow, doubled after ``growth_interval`` good steps."""

    dtype = torch.float16

    def __init__(self, init_scale: float = 65536.0, growth_interval: int = 2000) -> None:
        if init_scale <= 0 or growth_interval < 1:
            raise ConfigError(
                f"precision.init_scale={init_scale} and growth_interval={growth_interval} (steps) must be above 0"
            )
        self._init_scale, self._growth_interval = init_scale, growth_interval

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=self._init_scale, growth_interval=self._growth_interval
        )
