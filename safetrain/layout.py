"""What DDP was built for: which tensors train, and which buffers there are.

DDP looks at ``requires_grad`` once, when it wraps. A parameter frozen later is never reduced (the next forward raises),
one unfrozen or replaced later trains on local gradients without a word. So the loop compares before every window.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from safetrain.errors import UsageError


class ParameterLayout:
    """The parameters of a model at the moment of the wrap; comparing costs about 0.3 µs a parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._modules = [(module._parameters, len(module._parameters)) for module in model.modules()]
        self._count = sum(1 for _ in model.parameters())
        self._slots = [
            (module._parameters, key, parameter, parameter is not None and parameter.requires_grad)
            for module in model.modules()
            for key, parameter in module._parameters.items()
        ]
        self._storages = [p.data_ptr() for _, p in self.trained]
        # DDP's hooks hang on these nodes. Converting a parameter (.double(), .cuda()) makes a new node, without a hook.
        self.edges = [get_gradient_edge(p) for _, p in self.trained]
        self._kinds = [(p.dtype, p.device) for _, p in self.trained]

    def changed(self) -> bool:
        """Whether a parameter was frozen, unfrozen, replaced, added, or moved and moved back since.

        Raises:
            UsageError: a parameter is now of another dtype or on another device.
        """
        for parameters, key, parameter, requires_grad in self._slots:
            if parameters.get(key) is not parameter:
                return True
            if parameter is not None and parameter.requires_grad is not requires_grad:
                return True
        if any(len(parameters) != count for parameters, count in self._modules):
            return True
        storages = [p.data_ptr() for _, p in self.trained]
        if storages != self._storages:
            for (name, p), (dtype, device) in zip(self.trained, self._kinds, strict=True):
                if (p.dtype, p.device) != (dtype, device):
                    raise UsageError(
                        f"parameter {name} was {dtype} on {device} when training began and is now {p.dtype} on "
                        f"{p.device}: "
                        "move and convert the model before fit(), the optimizer and DDP hold on to what they were given"
                    )
            # new storage alone (an EMA swap through .data) leaves the hooks in place
            if any(
                get_gradient_edge(p).node is not edge.node
                for (_, p), edge in zip(self.trained, self.edges, strict=True)
            ):
                return True
            self._storages = storages
        return False

    def grown(self, model: nn.Module) -> bool:
        """Whether whole modules came or went; walks the model, so once an epoch."""
        return sum(1 for _ in model.parameters()) != self._count


class BufferGuard:
    """Remembers a model's buffers so that a dropped window leaves no trace in them (a NaN batch in a running mean,
    say)."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            (m._buffers, key) for m in model.modules() for key, buffer in m._buffers.items() if buffer is not None
        ]
        self._noted: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def note(self) -> None:
        """Remember the buffers as they are now."""
        buffers = [buffers[key] for buffers, key in self._slots]
        tensors = [buffer for buffer in buffers if buffer is not None]
        if not tensors:
            return
        if [t.shape for t in tensors] != [t.shape for t in self._copies]:
            self._copies = [torch.empty_like(t) for t in tensors]
        self._noted = tensors
        torch._foreach_copy_(self._copies, tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the remembered tensors with their remembered values, also where a module assigned a new one."""
        if not self._noted:
            return
        torch._foreach_copy_(self._noted, self._copies)
        noted = iter(self._noted)
        for buffers, key in self._slots:
            if buffers[key] is not None:
                buffers[key] = next(noted)
