"""The architecture, held by tests: who may import what, how long things may be, that every key of YAML is explained."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import safetrain

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "safetrain").glob("*.py"))
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.py") if path.name != "__init__.py")
YAML = sorted((ROOT / "configs").rglob("*.yaml"))

_LONGEST_FILE, _LONGEST_FIT = 300, 60
_MAY_IMPORT_DISTRIBUTED = {
    "agent.py", "collectives.py", "comm.py", "faults.py", "flight_recorder.py", "handover.py", "joining.py",
    "launch.py", "reduction.py", "script_groups.py", "sections.py", "sharding.py", "tensor_files.py",
}  # fmt: skip
_MAY_IMPORT_DDP = {"reduction.py"}
_NEEDS_NO_COMMENT = re.compile(r"^\s*(- |_target_|_partial_|defaults:|\w+: \$\{[\w.]+\}$)")  # the last: explained there


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; ``from a import b`` counts as ``a`` and as ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_the_public_names() -> None:
    assert list(safetrain.__all__) == sorted(safetrain.__all__)
    assert list(safetrain.__all__) == [
        "Audit",
        "BF16",
        "Checkpoint",
        "CheckpointError",
        "Comm",
        "CommunicationError",
        "ConfigError",
        "DDPStrategy",
        "DataError",
        "Event",
        "FP16",
        "FP32",
        "FSDPStrategy",
        "Loader",
        "Loop",
        "Loss",
        "Observer",
        "PeerFailed",
        "Policies",
        "Preempted",
        "Preflight",
        "PreflightError",
        "RankFailed",
        "RanksDiffer",
        "Result",
        "RunInfo",
        "SafetrainError",
        "SingleStrategy",
        "SkipBatch",
        "Trainer",
        "TrainingStopped",
        "UsageError",
        "Watchdog",
        "breakpoint",
    ]
    for name in safetrain.__all__:
        assert getattr(safetrain, name).__name__ == name


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_few_files_know_torch_distributed(path: Path) -> None:
    imported = imports_of(path)
    if path.name not in _MAY_IMPORT_DISTRIBUTED:
        assert not {name for name in imported if name.startswith("torch.distributed")}
    if path.name not in _MAY_IMPORT_DDP:
        assert not {name for name in imported if name.startswith("torch.nn.parallel")}


@pytest.mark.parametrize("path", [*PACKAGE, *RECIPES], ids=lambda path: path.name)
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= _LONGEST_FILE
    assert ast.get_docstring(ast.parse(path.read_text())), "its docstring says which"


def test_the_loop_is_read_on_one_screen() -> None:
    assert len(inspect.getsource(safetrain.Trainer.fit).splitlines()) <= _LONGEST_FIT


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_are_leaves(path: Path) -> None:
    assert not {name for name in imports_of(path) if re.match(r"(safetrain\.)?recipes\b", name)}


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_the_package_does_not_know_its_recipes(path: Path) -> None:
    assert not {name for name in imports_of(path) if name.startswith(("safetrain.recipes", "recipes"))}


def test_only_one_place_instantiates() -> None:
    calls = [path.name for path in PACKAGE if "hydra.utils.instantiate(" in path.read_text()]
    assert calls == ["worker.py"]


@pytest.mark.parametrize(
    "module",
    [
        "safetrain",
        "safetrain.config",
        "safetrain.cli",
        "safetrain.errors",
        "safetrain.lint_command",
        "safetrain.rank",
        "safetrain.guard",
    ],
)
def test_what_answers_at_once_does_not_wait_for_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_key_of_the_yaml_is_explained(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert any(line.startswith("#") and "@package" not in line for line in lines[:2]), (
        "the first comment says what it is"
    )
    unexplained = []
    block_indent: int | None = None  # inside a block of text (`key: |`)
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if block_indent is not None and (not line.strip() or indent > block_indent):
            continue
        block_indent = indent if line.rstrip().endswith("|") else None
        is_key = re.match(r"^\s*[\w/]+:", line) and not _NEEDS_NO_COMMENT.match(line)
        explained = "#" in line or (number > 0 and lines[number - 1].strip().startswith("#"))
        holds_explained_keys = line.rstrip().endswith(":")
        if is_key and not explained and not holds_explained_keys:
            unexplained.append(f"{number + 1}: {line}")
    assert not unexplained


def test_no_path_of_a_machine_is_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    files = [
        ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).suffix in (".py", ".toml", ".yaml", ".md")
    ]
    if listed.returncode == 0:
        assert files
    found = [path.name for path in files if path.exists() and re.search(r"/(home|Users|work)/\w", path.read_text())]
    assert not found
