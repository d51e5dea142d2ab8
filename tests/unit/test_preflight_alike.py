"""What has to be the same on all ranks: equal passes, and a difference names ranks and both values."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import safetrain
from safetrain import versions
from safetrain.alike import (
    CODE,
    CONFIG,
    ENVIRONMENT,
    PARAMETERS,
    VERSIONS,
    code_digests,
    environment_that_matters,
    layout_of,
    settings_of,
)
from tests.unit.fake_ranks import only, said

FACTS = {"python": "3.11.7", "torch": "2.13.0", "cuda": "12.6", "nccl": "2.27.3", "driver": "570.86", "safetrain": "1"}


def test_the_same_versions_everywhere() -> None:
    found = only(VERSIONS.judge(said(FACTS, FACTS)))
    assert (found.verdict, found.words) == ("ok", "")
    assert "torch 2.13.0" in found.value


def test_another_torch_on_one_machine() -> None:  # H80, S20
    other = {**FACTS, "torch": "2.12.1"}
    found = only(VERSIONS.judge(said(FACTS, FACTS, other, hosts=["a", "a", "b"])))
    assert (found.check, found.verdict, found.ranks) == ("versions", "refuse", (2,))
    assert found.words == "torch is not the same on all ranks: 2.13.0 on ranks 0 and 1 (a), 2.12.1 on rank 2 (b)."
    assert found.remedy == "Install the same on all machines."


@pytest.mark.parametrize(
    ("name", "verdict"), [("cuda", "refuse"), ("nccl", "refuse"), ("driver", "warn"), ("python", "warn")]
)
def test_which_versions_only_warn(name: str, verdict: str) -> None:
    assert only(VERSIONS.judge(said(FACTS, {**FACTS, name: "0"}))).verdict == verdict


def test_versions_are_read_from_this_process() -> None:
    assert versions.facts().items() <= VERSIONS.look(None).items()  # type: ignore[arg-type]


def test_a_variable_that_only_one_rank_has() -> None:
    found = only(ENVIRONMENT.judge(said({"NCCL_ALGO": "Ring"}, {})))
    assert found.verdict == "warn"
    assert found.words == "NCCL_ALGO is not the same on all ranks: Ring on rank 0, not set on rank 1."


def test_many_differences_are_counted() -> None:
    found = ENVIRONMENT.judge(said({f"NCCL_{n}": "1" for n in range(9)}, {}))
    assert [one.value for one in found][:1] == ["NCCL_0: 1 on rank 0, not set on rank 1"]
    assert found[-1].words == "6 more differ: NCCL_3, NCCL_4, NCCL_5, NCCL_6, NCCL_7, NCCL_8."
    assert found[-1].verdict == "warn"


def test_which_variables_matter() -> None:
    environ = {
        "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0", "NCCL_DEBUG": "WARN",
        "HOME": "/root", "RANK": "1", "CUDA_VISIBLE_DEVICES": "3", "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    assert list(environment_that_matters(environ)) == [
        "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    ]  # fmt: skip


def test_another_learning_rate() -> None:  # H105
    one, other = {"optimizer.lr": "0.1", "seed": "0"}, {"optimizer.lr": "0.03", "seed": "0"}
    found = only(CONFIG.judge(said(one, other)))
    assert (found.verdict, found.value) == ("refuse", "optimizer.lr: 0.1 on rank 0, 0.03 on rank 1")
    assert only(CONFIG.judge(said(one, one))).value == "2 values"


class _Mine(safetrain.Trainer):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).sum()


def test_what_a_trainer_in_a_script_was_told() -> None:
    settings = settings_of(_Mine(seed=3, loop=safetrain.Loop(epochs=7)))
    assert settings["loop.epochs"] == "7"
    assert settings["seed"] == "3"
    assert settings["trainer"] == "_Mine"
    assert not [text for text in settings.values() if " at 0x" in text], "an address is another in each process"


def test_code_of_the_users_and_of_safetrain(tmp_path: Path) -> None:  # another version of a file on one machine
    file = tmp_path / "mine.py"
    file.write_text("x = 1")
    module = ModuleType("mine")
    module.__file__ = str(file)
    before = code_digests({"mine": module, "torch": torch, "nothing": ModuleType("nothing")})
    assert list(before) == ["mine", "safetrain"]
    file.write_text("x = 2")
    after = code_digests({"mine": module})
    assert before["mine"] != after["mine"]
    assert before["safetrain"] == after["safetrain"]
    found = only(CODE.judge(said(before, after)))
    assert found.verdict == "refuse"
    assert found.words.startswith("mine is not the same on all ranks: ")


def test_a_file_that_only_rank_0_needs_says_nothing() -> None:
    found = only(CODE.judge(said({"safetrain": "a", "mine": "b", "plots": "c"}, {"safetrain": "a", "mine": "b"})))
    assert (found.verdict, found.value) == ("ok", "safetrain and 1 file of yours")


def test_a_file_that_is_gone() -> None:
    module = ModuleType("mine")
    module.__file__ = "/nowhere/mine.py"
    assert code_digests({"mine": module})["mine"] == "not there any more"


def test_the_first_parameter_that_differs() -> None:  # H25, H105
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    other.bias.requires_grad_(False)
    assert layout_of(model) == {"weight": "(3, 2) float32 trained", "bias": "(3,) float32 trained"}
    found = only(PARAMETERS.judge(said(layout_of(model), layout_of(other))))
    assert found.verdict == "refuse"
    assert found.words == (
        "bias is not the same on all ranks: (3,) float32 trained on rank 0, (3,) float32 frozen on rank 1."
    )
    wider = PARAMETERS.judge(said(layout_of(nn.Linear(2, 3)), layout_of(nn.Linear(5, 4))))
    assert [one.value for one in wider] == [
        "weight: (3, 2) float32 trained on rank 0, (4, 5) float32 trained on rank 1",
        "1 more differ",
    ]
    assert only(PARAMETERS.judge(said(layout_of(model), layout_of(model)))).value == "2 trained, 0 frozen, 0 buffers"
