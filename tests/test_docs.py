"""docs/: what is made from the code is as the code is, every block is tried somewhere, and the pages build."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from safetrain.config import Config

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))

_TRIED = {
    "api.md": "here",  # made from the code
    "checkpoints.md": "tests/launch/test_readme.py",
    "failures.md": "tests/launch/test_readme.py",  # its Python: tests/ranks/test_sections.py
    "first_step.md": "tests/launch/test_readme.py",
    "from_a_loop.md": "tests/ranks/test_from_pages.py",
    "from_accelerate.md": "tests/ranks/test_from_pages.py",
    "from_hf_trainer.md": "tests/ranks/test_from_pages.py",
    "from_lightning.md": "tests/ranks/test_from_pages.py",
    "guard.md": "tests/ranks/test_guard.py",
    "lint.md": "tests/unit/test_lint_page.py",
    "logging.md": "tests/ranks/test_logging_page.py",
    "machines.md": "",  # commands of Slurm; tests/unit/test_scheduler.py has what it sets
    "performance.md": "tests/launch/test_performance_page.py",
    "sweeps.md": "tests/unit/test_sweep.py",
    "training.md": "tests/ranks/test_training_page.py",
    "upgrading.md": "",  # no block
}
"""By which test the blocks of a page are run."""


def test_every_page_is_known_and_read_by_its_test() -> None:
    assert [page.name for page in PAGES] == sorted(_TRIED)
    for name, test in _TRIED.items():
        if test not in ("", "here"):
            assert name in (text := (ROOT / test).read_text()) or "docs/from_{page}.md" in text, (name, test)


def test_the_public_names_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("api", ROOT / "docs/api.py")
    assert spec is not None
    assert spec.loader is not None
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    assert (ROOT / "docs/api.md").read_text() == api.page(), "run `python docs/api.py`"


def keys_of(section: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    hints = get_type_hints(section)
    for each in fields(section):
        name = f"{prefix}{each.name}"
        found.add(name)
        if is_dataclass(hints[each.name]):
            found |= keys_of(hints[each.name], f"{name}.")
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_keys_that_a_page_names_are_there(page: Path) -> None:
    keys = keys_of(Config)
    sections = {key.partition(".")[0] for key in keys if "." in key} - {"policy"}
    named = re.findall(r"`(\w+\.\w+)(?:=[^`]*)?`", page.read_text())
    assert not {name for name in named if name.partition(".")[0] in sections and not name.endswith(".py")} - keys


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_choices_that_a_page_names_are_there(page: Path) -> None:
    groups = {path.name: path for path in (ROOT / "configs").iterdir() if path.is_dir()}
    groups |= {f"policy/{path.name}": path for path in (ROOT / "configs/policy").iterdir()}
    missing = {
        f"{group}={choice}"
        for group, choice in re.findall(r"`([a-z_/]+)=([a-z]\w*)`", page.read_text())
        if group in groups and group != "recipe" and not (groups[group] / f"{choice}.yaml").exists()
    }
    assert missing <= {"observers=mlflow", "preset=slurm"}  # the user's own, shown on their pages


def test_tables_of_failures_say_all_of_each() -> None:
    _, text = (ROOT / "docs/failures.md").read_text().split("\n## Every kind")
    tables = re.findall(r"### (.*)\n\n(\| how it shows \| why \| what safetrain does \|\n(?:\|.*\n)+)", text)
    assert len(tables) == len(re.findall(r"^### ", text, re.MULTILINE)) > 10
    for kind, table in tables:
        for row in table.splitlines()[2:]:
            assert [bool(cell.strip()) for cell in row.split(" | ")] == [True] * 3, (kind, row)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_pages_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    for page in ("index", "architecture", "failures/index", "from_lightning/index", "api/index"):
        assert (tmp_path / "site" / page).with_suffix(".html").exists() or (
            tmp_path / "site" / page / "index.html"
        ).exists(), page
