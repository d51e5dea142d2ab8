"""The linter's command line: what it reads, leaves out, prints and answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from safetrain.lint_command import RULES, check, main

ROOT = Path(__file__).parents[2]
BARRIER = """\
import torch.distributed as dist

if dist.get_rank() == 0:
    dist.barrier()
"""
SAMPLER = "from torch.utils.data import DataLoader\n\nloader = DataLoader([], shuffle=True, sampler=[])\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(BARRIER)
    return path


def test_a_finding_is_a_line_with_its_reason_and_its_help(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.py"]) == 1
    assert capsys.readouterr().out == (
        "train.py:4:5: ST101 dist.barrier is called on rank 0 only\n"
        f"    {RULES['ST101'].why}\n"
        f"    help: {RULES['ST101'].fix}\n"
        "Found 1 in 1 file.\n"
    )


def test_a_clean_file_is_0(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import torch.distributed as dist\n\ndist.barrier()\n")
    assert main(["train.py"]) == 0
    assert capsys.readouterr().out == "Nothing found in 1 file.\n"


def test_folders_are_read_without_what_is_not_the_project_s(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("src/inner", "src/.venv", "src/site-packages", "src/__pycache__"):
        (script.parent / folder).mkdir(parents=True)
        (script.parent / folder / "also.py").write_text(BARRIER)
    (script.parent / "src" / "notes.txt").write_text("dist.barrier()")
    assert main(["src", "train.py"]) == 1
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if ": ST" in line] == ["src/inner/also.py", "train.py"]
    assert out.endswith("Found 2 in 2 files.\n")


def test_a_file_that_is_not_python_is_told_and_the_others_are_read(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script.parent / "old.py").write_text("import os\nprint 'hello'\n")
    (script.parent / "zero.py").write_bytes(b"x = 1\0\n")
    (script.parent / "latin.py").write_bytes(b"# caf\xe9\n")
    assert main(["old.py", "zero.py", "latin.py", "train.py"]) == 2
    said = capsys.readouterr()
    assert "train.py:4:5: ST101" in said.out
    assert said.out.endswith("Found 1 in 1 file.\n")
    assert said.err.startswith("old.py:2: not read: Missing parentheses in call to 'print'")
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["old.py", "zero.py", "latin.py"]


def test_a_file_is_read_in_the_encoding_that_it_names(script: Path) -> None:
    script.write_bytes(b"# coding: latin-1\n# caf\xe9\n" + BARRIER.encode())
    assert main(["train.py"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no file or folder to read"),
        (["gone.py"], "gone.py: no such file or folder"),
        (["train.py", "--select", "ST1011"], "ST1011: no such rule. Did you mean ST101? All: ST101, ST102,"),
        (["train.py", "--select", " "], "no rule is named"),
        (["train.py", "--ignore", "no-set-epochs"], "no-set-epochs: no such rule. Did you mean no-set-epoch?"),
        (["--explain", "barrier"], "barrier: no such rule."),
    ],
)
def test_wrong_use_is_2_and_says_what_there_is(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_option_is_2(script: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train.py", "--format", "xml"])
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ([], ["ST101", "ST202"]),
        (["--select", "ST2"], ["ST202"]),
        (["--select", "collective-under-rank"], ["ST101"]),
        (["--select", "ST101,ST202", "--ignore", "ST101"], ["ST202"]),
        (["--ignore", "st1 st2"], []),
    ],
)
def test_rules_are_chosen_by_id_beginning_or_name(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], ids: list[str]
) -> None:
    script.write_text(BARRIER + SAMPLER)
    assert main(["train.py", "--format", "json", *arguments]) == bool(ids)
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == ids


@pytest.mark.parametrize(
    ("comment", "found"),
    [
        ("# noqa", 0),
        ("# noqa: ST101", 0),
        ("# noqa:ST202, ST101  because", 0),
        ("# NOQA: st101", 0),
        ("# noqa: ST102", 1),
        ("# noqa: F401", 1),
        ("# no", 1),
    ],
)
def test_noqa(comment: str, found: int) -> None:
    assert len(check("train.py", f"{BARRIER.rstrip()}  {comment}\n")) == found


def test_noqa_at_the_end_of_a_long_call() -> None:
    code = (
        "from torch.utils.data import DataLoader\nloader = DataLoader(\n    [],\n    shuffle=True,\n    sampler=[],\n)"
    )
    assert [(one.line, one.column) for one in check("train.py", code)] == [(2, 10)]
    assert check("train.py", f"{code}  # noqa: ST202") == []


def test_noqa_in_a_handler_s_body_does_not_excuse_the_handler() -> None:
    code = """\
import torch.distributed as dist
for batch in loader:
    try:
        loss.backward()
    except RuntimeError:
        pass  # noqa
    optimizer.step()
"""
    assert [one.id for one in check("train.py", code)] == ["ST105"]
    assert check("train.py", code.replace("RuntimeError:", "RuntimeError:  # noqa: ST105")) == []


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--explain", "ST104"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ST104 exit-by-data\n")
    assert RULES["ST104"].why in said
    assert RULES["ST104"].fix in said
    assert "docs/lint.md" in said


def test_github(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.py", "--format", "github"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "::error file=train.py,line=4,col=5,title=ST101 collective-under-rank::dist.barrier is called on rank 0 only. "
    )


def test_sarif(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.py", "--format", "sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "safetrain.lint"
    assert [rule["id"] for rule in rules] == list(RULES)
    assert all(rule["fullDescription"]["text"] and rule["help"]["text"] for rule in rules)
    (result,) = run["results"]
    assert result["ruleId"] == rules[result["ruleIndex"]]["id"] == "ST101"
    assert result["message"]["text"].startswith("dist.barrier is called on rank 0 only.")
    (location,) = result["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "train.py"},
        "region": {"startLine": 4, "startColumn": 5},
    }


def test_sarif_and_json_of_a_clean_file_are_whole(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("")
    assert main(["train.py", "--format", "sarif"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["results"] == []
    assert main(["train.py", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.py", "--format", "json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["path"], one["line"], one["column"], one["id"]) == ("train.py", 4, 5, "ST101")
    assert (one["name"], one["fix"]) == ("collective-under-rank", RULES["ST101"].fix)


def test_as_a_command_it_does_not_load_torch(script: Path) -> None:
    code = f"import sys; from safetrain.lint_command import main; found = main([{str(script)!r}])"
    code += "; sys.exit(found + ('torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_it_runs_nothing_of_the_folder_that_it_reads(script: Path) -> None:
    for name in ("argparse", "ast", "difflib", "json", "tokenize", "torch"):
        (script.parent / f"{name}.py").write_text("raise SystemExit(3)\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "safetrain.lint", "train.py", "json.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("train.py:4:5: ST101")


def test_its_own_project_is_clean() -> None:
    assert main([str(ROOT / "safetrain"), str(ROOT / "recipes")]) == 0
