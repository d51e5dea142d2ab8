"""Weights for others: plain names, plain files, no safetrain needed to read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from safetrain.errors import CheckpointError, UsageError
from safetrain.export import export, main
from safetrain.safetensors import write_safetensors
from tests.states import assert_equal, checkpoint_at, shared_state

EVERY_TYPE = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.bool, torch.complex64,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8,
]  # fmt: skip


def read(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path) if path.suffix == ".safetensors" else torch.load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("asked", ["", "checkpoints", "checkpoints/latest", "checkpoints/step_7"])
def test_a_plain_module_loads_them(tmp_path: Path, name: str, asked: str) -> None:
    checkpoint_at(tmp_path / "checkpoints", step=7)
    said = export(tmp_path / asked, tmp_path / name)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model.load_state_dict(read(tmp_path / name))
    for key, tensor in shared_state(7)["model"].items():
        assert torch.equal(model.state_dict()[key], tensor), key
    assert said == f"{tmp_path / name}: 7 tensors, 257 values, of step 7 ({tmp_path}/checkpoints/step_7)"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("dtype", EVERY_TYPE, ids=str)
def test_every_type_is_read_back_by_others(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "odd": torch.ones(3, dtype=torch.bool),
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "turned": torch.arange(6).reshape(2, 3).to(dtype).t(),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
    }
    write_safetensors(tensors, tmp_path / "t.safetensors")
    found = read(tmp_path / "t.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].tolist() == tensor.tolist()


def test_what_the_format_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"phase is of type torch.complex128, .*: write a \.pt file"):
        write_safetensors({"phase": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "t.safetensors")


def test_an_earlier_file_stays_where_the_new_one_fails(tmp_path: Path) -> None:
    checkpoint_at(tmp_path / "checkpoints", step=7, shared={"model": {"phase": torch.zeros(1, dtype=torch.complex128)}})
    (tmp_path / "model.safetensors").write_text("earlier")
    with pytest.raises(UsageError, match="phase"):
        export(tmp_path, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_text() == "earlier"
    assert not list(tmp_path.glob(".*"))


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "model.bin"]) == 2
    assert capsys.readouterr().err == "model.bin: the name must end in .safetensors or .pt\n"
    assert main([str(tmp_path / "nothing"), "model.pt"]) == 1
    assert capsys.readouterr().err == f"{tmp_path}/nothing is not there\n"
    assert main([str(tmp_path), "model.pt"]) == 1
    assert "is not a checkpoint of safetrain" in capsys.readouterr().err


def test_a_checkpoint_without_a_model_says_what_it_has(tmp_path: Path) -> None:
    checkpoint_at(tmp_path / "checkpoints", step=7, shared={"weights": {}, "other": {}})
    with pytest.raises(CheckpointError, match="has no model; it has weights, other"):
        export(tmp_path, tmp_path / "model.pt")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    checkpoint_at(tmp_path / "checkpoints", step=7)
    command = [sys.executable, "-m", "safetrain.export", str(tmp_path), str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "7 tensors, 257 values, of step 7" in done.stdout
    assert_equal(torch.load(tmp_path / "model.pt"), dict(shared_state(7)["model"]))
