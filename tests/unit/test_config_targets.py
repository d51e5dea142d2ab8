"""Targets are imported and held against their signatures before a process starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetrain import targets
from safetrain.errors import ConfigError
from safetrain.targets import check_targets
from safetrain.user_path import search_user_code_last


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder as the current one, importable; what was imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    search_user_code_last()
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def refusal(node: dict[str, Any], key: str = "model") -> str:
    with pytest.raises(ConfigError) as refused:
        check_targets({key: node})
    return str(refused.value)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "torch.optim.SDG"}, "model._target_=torch.optim.SDG: torch.optim has no SDG. Did you mean SGD?"),
        ({"_target_": "torch.optin.SGD"}, "model._target_=torch.optin.SGD: torch has no optin. Did you mean optim?"),
        ({"_target_": "trch.optim.SGD"}, "there is no module trch. Did you mean torch?"),
        ({"_target_": "torch.nn.Linear.wieght"}, "torch.nn.Linear has no wieght."),
        ({"_target_": "Model"}, "model._target_=Model: must be package.module.Name"),
        ({"_target_": "torch.pi"}, "model._target_=torch.pi: is float, not something to call"),
        ({"_target_": "torch.nn.Linear", "in_feature": 3}, "model.in_feature: torch.nn.Linear takes no such argument."),
        ({"_target_": "torch.nn.Linear", "in_feature": 3}, "Did you mean in_features? It takes: in_features,"),
        ({"_target_": "torch.nn.Linear", "in_features": 3}, "missing a required argument: 'out_features'"),
        ({"_target_": "torch.optim.SGD", "lr": 0.1}, "needs _partial_: true"),
    ],
)
def test_a_wrong_target_or_argument_names_the_nearest_right_one(node: dict[str, Any], message: str) -> None:
    assert message in refusal(node)


def test_targets_are_found_at_any_depth() -> None:
    nodes = {"parts": [{"head": {"_target_": "torch.nn.Linaer"}}]}
    assert refusal(nodes, "model").startswith("model.parts[0].head._target_=torch.nn.Linaer: torch.nn has no Linaer.")


def test_what_is_right_passes() -> None:
    check_targets({"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2})
    check_targets({"_target_": "torch.nn.Linear", "_args_": [3, 2]})
    check_targets({"_target_": "torch.nn.Linear", "_partial_": True})
    check_targets({"_target_": "builtins.dict", "anything": 1})  # takes any keyword, or has no signature
    check_targets(None)


def test_an_error_in_the_users_module_names_its_line(project: Path) -> None:
    (project / "broken.py").write_text("import torch\n\nraise RuntimeError('no licence')\n")
    (project / "unfinished.py").write_text("def f(:\n")
    (project / "needs.py").write_text("import not_installed_anywhere\n")
    (project / "script.py").write_text("import sys\nsys.exit('usage: script.py FILE')\n")
    assert f"at {project}/broken.py:3: RuntimeError: no licence" in refusal({"_target_": "broken.Model"})
    assert f"at {project}/unfinished.py:1: SyntaxError" in refusal({"_target_": "unfinished.Model"})
    assert f"at {project}/needs.py:1: No module named" in refusal({"_target_": "needs.Model"})
    assert f"at {project}/script.py:2: SystemExit: usage" in refusal({"_target_": "script.Model"})


MODELS = """
from __future__ import annotations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union
if TYPE_CHECKING:
    from torch import Tensor as Unknown
from torch import Tensor
import functools

def judged(width: int, depth: Optional[int] = None, rate: Union[float, Tensor] = 1.0, on: bool | None = True): ...
def free(size: int | str, path: Path, name: str, any: Any, bare, later: Unknown, odd: int = "auto", *a: int): ...
def loose(**kwargs: int): ...
def weighted(weight: Tensor | None): ...
class Net:
    def __init__(self, other: Unknown, width: int): ...
class Wide(Net): ...
@functools.wraps(judged)
def wrapped(*args, **kwargs): ...
"""


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"_target_": "annotated.judged", "width": "abc"}, "model.width='abc': judged takes a whole number (int) here"),
        ({"_target_": "annotated.judged", "width": 1, "depth": "a"}, "judged takes a whole number (int) or null here"),
        ({"_target_": "annotated.judged", "width": 1, "rate": "a"}, "model.rate='a': judged takes a number (float)"),
        ({"_target_": "annotated.judged", "width": 1, "on": "a"}, "judged takes true or false (bool) or null here"),
        ({"_target_": "annotated.judged", "width": "x", "_partial_": True}, "takes a whole number (int) here"),
        ({"_target_": "annotated.Wide", "other": "x", "width": "abc"}, "model.width='abc': Wide takes a whole number"),
        ({"_target_": "annotated.weighted", "weight": "x"}, "weighted takes a tensor or null here"),
        ({"_target_": "annotated.wrapped", "width": "abc"}, "model.width='abc': wrapped takes a whole number (int)"),
    ],
)
def test_a_text_for_a_number_is_refused(project: Path, node: dict[str, Any], said: str) -> None:
    (project / "annotated.py").write_text(MODELS)
    assert said in refusal(node)


def test_no_other_annotation_is_judged(project: Path) -> None:
    (project / "annotated.py").write_text(MODELS)
    names = ("size", "path", "name", "any", "bare", "later", "odd")
    check_targets({"_target_": "annotated.free", **dict.fromkeys(names, "text")})
    check_targets({"_target_": "annotated.loose", "kwargs": "text"})
    check_targets({"_target_": "annotated.judged", "width": 1.5, "depth": [2], "rate": 3, "on": None})


def test_a_module_that_is_not_there_tells_where_it_was_looked_for(project: Path) -> None:
    said = f"model._target_=spirals.mlp: there is no module spirals: no spirals.py in {project}; run from its folder"
    assert refusal({"_target_": "spirals.mlp"}) == said
    (project / "spiral.py").write_text("")
    assert refusal({"_target_": "spirals.mlp"}).endswith("there is no module spirals. Did you mean spiral?")


def test_a_library_of_the_field_that_is_not_there_can_be_installed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(targets._LIBRARIES, "seeing", "open-seeing")
    remedy = "install it (pip install open-seeing)"
    said = refusal({"_target_": "seeing.models.resnet"})
    assert said.endswith(f"there is no module seeing: no seeing.py in {project}; run from its folder, or {remedy}")
    (project / "needs_it.py").write_text("import seeing.models\n")
    assert refusal({"_target_": "needs_it.x"}).endswith(f"No module named 'seeing'; {remedy}")
    assert targets._LIBRARIES["torchvision"] == "torchvision"


def test_the_nearest_name_is_looked_for_in_the_users_own_files(project: Path) -> None:
    (project / "my_models.py").write_text("class Network: pass\n")
    assert refusal({"_target_": "my_model.Network"}).endswith("Did you mean my_models?")
    assert refusal({"_target_": "my_models.Netwrok"}).endswith("my_models has no Netwrok. Did you mean Network?")


def test_a_users_file_with_the_name_of_pythons_own_is_told_apart(project: Path) -> None:
    (project / "queue.py").write_text("class Model: pass\n")
    message = refusal({"_target_": "queue.Model"})
    assert "queue has no Model" in message
    assert "Your queue.py has the name of another module" in message


def test_the_current_folder_is_searched_last(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(project), "/somewhere"])  # as `python -m` leaves it
    search_user_code_last()
    assert sys.path == ["/somewhere", str(project)]
    search_user_code_last()
    assert sys.path == ["/somewhere", str(project)]
