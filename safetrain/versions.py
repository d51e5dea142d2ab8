"""What this process runs: the versions that have to be the same on all ranks, as text by name."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def facts(driver: Path = _DRIVER) -> dict[str, str]:
    """``{"python": "3.12.3", "torch": "2.13.0+cpu", "cuda": "none", ...}``; the same keys on every machine.

    No GPU is touched: which driver there is stands in a file of the kernel's module.
    """
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": _nccl(),
        "driver": driver_version(driver),
        "safetrain": _safetrain(),
    }


def driver_version(file: Path = _DRIVER) -> str:
    """Of the GPU driver; ``none`` on a machine without."""
    try:
        words = file.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return "none"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _nccl() -> str:
    """Of the NCCL that torch was built with; ``none`` in a build without."""
    if not torch.cuda.is_available():  # a build for GPUs on a machine without: NCCL would look for the driver
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _safetrain() -> str:
    try:
        return version("safetrain")
    except PackageNotFoundError:  # imported from a checkout that is not installed
        return "not installed"
