"""``python -m safetrain.new``: what it writes, and what it refuses."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from safetrain import new
from safetrain.errors import UsageError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_two_files_and_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert new.main(["red_fox"]) == 0
    assert sorted(str(path) for path in Path().rglob("*.*")) == ["red_fox/recipe/red_fox.yaml", "red_fox/red_fox.py"]
    said = capsys.readouterr().out
    assert said.splitlines()[-1].strip() == "cd red_fox && python -m safetrain recipe=red_fox"
    code, recipe = Path("red_fox/red_fox.py").read_text(), Path("red_fox/recipe/red_fox.yaml").read_text()
    assert "my_project" not in code + recipe
    defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    config = yaml.safe_load(recipe)
    targets = {config["trainer"]["_target_"], config["model"]["_target_"], config["data"]["train"]["_target_"]}
    assert targets == {f"red_fox.{name}" for name in defined} == {"red_fox.RedFox", "red_fox.model", "red_fox.Points"}


def test_what_is_there_stays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("fox").mkdir()
    assert new.main(["fox"]) == 2
    assert "fox: is there already, and stays as it is." in capsys.readouterr().err
    assert list(Path("fox").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-fox", "Did you mean my_fox?"),
        ("Fox 2", "Did you mean fox_2?"),
        ("2fox", "Did you mean my_2fox?"),
        ("class", "Did you mean my_class?"),
        ("torch", "there is another module of that name"),
        ("json", "Try my_json."),
        ("recipe", "Try my_recipe."),
        ("resnet_ddp", "safetrain ships a recipe of that name"),
        ("", "Did you mean my_project?"),
    ],
)
def test_a_name_that_can_not_be_is_refused_with_one_that_can(name: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        new.write(Path("below", name) if name else Path("/nowhere/..."))
    assert words in str(refused.value)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--name"]])
def test_wrong_use_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert new.main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m safetrain.new NAME")


def test_where_nothing_can_be_written_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert new.main(["file/fox"]) == 1
    assert capsys.readouterr().err.startswith("file/fox: can't be written: ")


def test_it_answers_without_torch() -> None:
    code = "import sys; from safetrain import new; new.main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m safetrain.new my_project" in done.stdout
