"""docs/from_*.md: what a page shows twice, in another framework and here, comes to the same weights."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.toys import assert_close, assert_same

ROOT = Path(__file__).parents[2]
NEEDS = {"a_loop": None, "lightning": "lightning", "accelerate": "accelerate", "hf_trainer": "transformers"}
State = dict[str, torch.Tensor]

pytestmark = pytest.mark.filterwarnings("default")  # other frameworks warn as they like


def python_blocks(page: str) -> list[str]:
    text = (ROOT / f"docs/from_{page}.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def script(text: str, times_joined: int) -> dict[str, Any]:
    """The names that a script leaves, run as a process of torchrun would."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(times_joined)  # the store holds what an earlier group wrote
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "docs/from_*.md", "exec"), names)
    return names


def both(comm: Comm, page: str, folder: Path) -> tuple[State, float, State, float]:
    """Weights and accuracy of the other framework, and of safetrain."""
    comm.leave()
    os.chdir(folder)
    os.environ.update(TORCHELASTIC_RUN_ID="page", GROUP_RANK="0", PL_GLOBAL_SEED="0")
    shown = re.search(r"`spirals.py`:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert shown is not None
    spirals = sys.modules["spirals"] = ModuleType("spirals")
    exec(compile(shown[1], "spirals.py", "exec"), spirals.__dict__)
    other, ours, *_ = python_blocks(page)
    theirs = script(other, 1)
    there = theirs.get("model") or theirs["module"].model
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    here = script(ours, 2)
    return weights(getattr(there, "mlp", there)), theirs["accuracy"], weights(here["trainer"].model), here["accuracy"]


def weights(model: torch.nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("page", NEEDS)
def test_both_sides_come_to_the_same_weights(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning's import sets it
    if (package := NEEDS[page]) is not None:
        pytest.importorskip(package)
        importlib.import_module(package)  # seconds: once, and not in every rank
    runs = run_ranks(both, 2, page, tmp_path, timeout_s=100.0)
    assert_same([there for there, _, _, _ in runs])
    assert_same([here for _, _, here, _ in runs])
    for there, their_accuracy, here, our_accuracy in runs:
        assert_close(here, there, 1e-5)
        assert our_accuracy == pytest.approx(their_accuracy, abs=1e-5)
        assert our_accuracy > 0.55  # it has learned something


def test_a_page_has_both_sides() -> None:
    assert {page: len(python_blocks(page)) for page in NEEDS} == dict.fromkeys(NEEDS, 3) | {"hf_trainer": 4}


@pytest.mark.parametrize("page", NEEDS)
def test_a_page_gives_a_script_what_a_config_has(page: str) -> None:
    class Spirals(safetrain.Trainer):
        def training_step(self, batch: Any) -> None:
            return None

    names: dict[str, Any] = {"Spirals": Spirals}
    exec(compile(python_blocks(page)[-1], f"docs/from_{page}.md", "exec"), names)
    trainer = names["trainer"]
    config = yaml.safe_load((ROOT / "configs/observers/default.yaml").read_text())
    given = [f"safetrain.telemetry.{type(one).__name__}" for one in trainer.observers]
    assert given == [node["_target_"] for node in config.values()]
    assert trainer.run_dir == Path("outputs/mine")


def test_a_model_of_transformers() -> None:
    """Its loss by tokens over uneven validation data is that of one process; its tied weights stay tied."""
    pytest.importorskip("transformers")
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")

    def work(comm: Comm) -> tuple[State, int, float, float]:
        names: dict[str, Any] = {}
        exec(compile(python_blocks("hf_trainer")[2], "docs/from_hf_trainer.md", "exec"), names)
        trainer = names["trainer"]
        result = trainer.fit()
        samples = trainer._given_val_data
        whole = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        with torch.no_grad():
            loss = float(trainer.model.eval()(**whole).loss)
        assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight
        return weights(trainer.model), result.step, result.metrics["val/loss"], loss

    runs = run_ranks(work, 2)
    assert_same([state for state, _, _, _ in runs])
    for _, step, logged, loss in runs:
        assert step == 8
        assert logged == pytest.approx(loss, abs=1e-5)
        assert loss < 2.1  # ln 8 = 2.08 is what guessing gives
