"""The copy that training waits for: tensors into host memory, which a thread may then write at leisure."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Staging:
    """Memory for one copy, kept from save to save: to a process, memory that is new costs several times the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of ``tensors`` that hold until the next call."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(name)
        if known is not None and (known.shape, known.dtype) == (tensor.shape, tensor.dtype):
            return known
        # page-locked for a GPU: all copies are then under way at once, at the full speed of the bus
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
