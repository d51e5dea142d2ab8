"""What a process says that it runs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from safetrain import versions


def test_every_version_is_told_as_text() -> None:
    facts = versions.facts()
    assert list(facts) == ["python", "torch", "cuda", "nccl", "driver", "safetrain"]
    assert facts["torch"] == torch.__version__
    assert facts["safetrain"] == version("safetrain")
    assert all(value and isinstance(value, str) for value in facts.values())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Mon Feb 26\nGCC version: 12\n", "535.161.08"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("something else\n", "unknown"),
        ("", "none"),
    ],
)
def test_the_driver_is_read_from_the_kernels_file(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "version").write_text(text)
    assert versions.driver_version(tmp_path / "version") == told


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    assert versions.facts(tmp_path / "none")["driver"] == "none"
