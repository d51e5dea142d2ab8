"""Writes the safetensors format: the length of a header, the header as JSON, the tensors' bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from safetrain.errors import UsageError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_ALIGNMENT = 8  # bytes; readers map the file into memory


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """
    Raises:
        UsageError: a tensor is of a type that the format does not have.
    """
    # the widest first, so that each begins at a multiple of its elements' size
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise UsageError(f"{name} is of type {tensor.dtype}, which safetensors does not have: write a .pt file")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in ordered:
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
