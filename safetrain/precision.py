"""Number formats, and the order of an optimizer step: scale → backward → unscale → weigh → clip → step → update.

Gradients are clipped after unscaling, on every rank alike (under DDP they are equal already: clipping communicates
nothing). A window that the ranks dropped never reaches the scaler, so ``unscale_`` is never left without its
``update``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of the gradients of one window."""

    finite: bool
    grad_norm: float
    scale_coming_down: bool = False  # a loss scale that is still being searched for explains the overflow


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

    def step(self, optimizers: Sequence[Optimizer], clip: Clip, factor: float) -> Applied:
        """One step of every optimizer, unless a gradient is not finite: then of none, on any rank (gradients are
        equal).

        ``factor`` makes the reduced gradients the exact weighted mean; 1.0 as a rule, and then nothing is multiplied.
        """
        scaler = self.scaler
        norms = []
        for optimizer in optimizers:
            if scaler is not None:
                scaler.unscale_(optimizer)
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            norm = nn.utils.get_total_norm(gradients)
            norms.append(float(norm))
            if clip.norm is not None and math.isfinite(norms[-1]):
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grads_with_norm_(parameters, clip.norm, norm)
            if clip.value is not None:
                nn.utils.clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], clip.value)
        grad_norm = math.hypot(*norms)
        finite = math.isfinite(grad_norm)
        if finite:
            for optimizer in optimizers:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
        if scaler is None:
            return Applied(finite, grad_norm)
        scaler.update()
        return Applied(finite, grad_norm, scale_coming_down=not finite and scaler.get_scale() >= 1.0)


class FP32(Precision):
    """Single precision throughout."""


class BF16(Precision):
    """Autocast to bfloat16; parameters and gradients stay fp32. Needs no loss scale: the exponent is fp32's."""

    dtype = torch.bfloat16


class FP16(Precision):
    """Autocast to float16 with a loss scale that halves on overflow and doubles after ``growth_interval`` good
    steps."""

    dtype = torch.float16

    def __init__(self, init_scale: float = 65536.0, growth_interval: int = 2000) -> None:
        if init_scale <= 0 or growth_interval < 1:
            raise ConfigError(
                f"precision.init_scale={init_scale} must be above 0, growth_interval={growth_interval} at least 1 "
                f"(steps)"
            )
        self._init_scale, self._growth_interval = init_scale, growth_interval

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=self._init_scale, growth_interval=self._growth_interval
        )
