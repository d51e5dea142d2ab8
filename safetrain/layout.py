"""What DDP was built for: which tensors train, and which buffers there are.

DDP looks at ``requires_grad`` once, when it wraps. A parameter frozen later is never reduced (the next forward raises),
one unfrozen or replaced later trains on local gradients without a word. So the loop compares before every window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from safetrain.comm import Comm
from safetrain.errors import UsageError


class ParameterLayout:
    """The parameters of a model at the moment of the wrap; comparing costs about 0.3 µs a parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._modules = [(name, m._parameters, len(m._parameters)) for name, m in model.named_modules()]
        self._count = sum(1 for _ in model.parameters())
        self._slots = [
            (f"{module_name}.{key}".lstrip("."), parameters, key, p, p is not None and p.requires_grad)
            for module_name, parameters, _ in self._modules
            for key, p in parameters.items()
        ]
        self._storages = [p.data_ptr() for _, p in self.trained]
        # DDP's hooks hang on these nodes. Converting a parameter (.double(), .cuda()) makes a new node, without a hook.
        self.edges = [get_gradient_edge(p) for _, p in self.trained]
        self._kinds = [(p.dtype, p.device) for _, p in self.trained]

    def check_same_on_all_ranks(self, comm: Comm) -> None:
        """All ranks are about to train the same parameters.

        Raises:
            UsageError: they are not; with the first that differs.
        """
        mine = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.trained]
        for rank, theirs in enumerate(comm.gather(mine)):
            if theirs != mine:
                difference = _first_difference(mine, theirs)
                raise UsageError(
                    f"ranks {comm.rank} and {rank} would train different parameters: {difference}. "
                    "Build the model from the config alone, the same on every rank."
                )
        if not mine:
            raise UsageError("the model has no parameter with requires_grad=True: nothing to train")

    def change(self) -> str | None:
        """What was frozen, unfrozen, replaced, added, or moved and moved back since; None: nothing.

        Raises:
            UsageError: a parameter is now of another dtype or on another device.
        """
        for name, parameters, key, parameter, requires_grad in self._slots:
            if parameters.get(key) is not parameter:
                return f"{name} was replaced"
            if parameter is not None and parameter.requires_grad is not requires_grad:
                return f"{name} was {'frozen' if requires_grad else 'unfrozen'}"
        return self._added() or self._moved()

    def replaced(self) -> str | None:
        """What was replaced or added; None: nothing, though something may have been frozen or unfrozen."""
        for name, parameters, key, parameter, _ in self._slots:
            if parameters.get(key) is not parameter:
                return f"{name} was replaced"
        return self._added()

    def _added(self) -> str | None:
        for name, parameters, count in self._modules:
            if len(parameters) != count:
                return f"a parameter was added to {name or 'the model'}"
        return None

    def _moved(self) -> str | None:
        storages = [p.data_ptr() for _, p in self.trained]
        if storages == self._storages:
            return None
        self.check_kinds()
        # new storage alone (an EMA swap through .data) leaves the hooks in place
        for (name, p), edge in zip(self.trained, self.edges, strict=True):
            if get_gradient_edge(p).node is not edge.node:
                return f"{name} was moved or converted, and back"
        self._storages = storages
        return None

    def check_kinds(self) -> None:
        """
        Raises:
            UsageError: a parameter is now of another dtype or on another device.
        """
        for (name, p), (dtype, device) in zip(self.trained, self._kinds, strict=True):
            if (p.dtype, p.device) != (dtype, device):
                raise UsageError(
                    f"parameter {name} was {dtype} on {device} when training began and is now {p.dtype} on {p.device}: "
                    "move and convert the model before fit(), the optimizer and DDP hold on to what they were given"
                )

    def convert_back(self) -> None:
        """Parameters in the dtype and on the device that DDP knows: a rank that fails must still take part once."""
        for (_, p), (dtype, device) in zip(self.trained, self._kinds, strict=True):
            p.data = p.data.to(device, dtype)
            if p.grad is not None:  # DDP's own view of its bucket, converted with the parameter
                p.grad.data = p.grad.data.to(device, dtype)

    def growth(self, model: nn.Module) -> str | None:
        """Whether whole modules came or went; walks the model, so once an epoch."""
        count = sum(1 for _ in model.parameters())
        return None if count == self._count else f"the model has {count} parameters now, and had {self._count}"


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

    @torch.no_grad()
    def restore_unless(self, keep: torch.Tensor) -> None:
        """Put back the remembered values where ``keep`` is false, decided on the device."""
        if not self._noted:
            return
        current = [buffer for buffers, key in self._slots if (buffer := buffers[key]) is not None]
        for buffer, copy in zip(current, self._copies, strict=True):
            buffer.copy_(torch.where(keep, buffer, copy))


def _first_difference(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return f"{a} against {b}"
    return f"{len(mine)} against {len(theirs)} parameters"
