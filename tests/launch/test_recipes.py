"""The shipped recipes and the template for one's own, launched for real in an empty folder, as their users would."""

from __future__ import annotations

import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 800.0  # the longest takes 2 minutes on two idle cores
RECIPES = ["gpt_ddp", "stream_ddp", "gan_ddp", "finetune_ddp"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(command: str, folder: Path, code: int = 0) -> str:
    """What a shown command prints, in ``folder``, by a shell; it must end with ``code``."""
    here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, env=os.environ | {"PATH": here}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics_of(folder: Path) -> dict[str, float]:
    (result,) = folder.rglob("result.json")
    return json.loads(result.read_text())["metrics"]


def test_a_new_project_runs_as_it_is_told(tmp_path: Path) -> None:
    said = run("python -m safetrain.new my_project", tmp_path)
    shown = run(said.splitlines()[-1].strip() + " device=cpu", tmp_path)
    assert "my_project: 2 ranks" in shown
    assert metrics_of(tmp_path / "my_project")["val/accuracy"] > 0.95
    assert re.search(
        r"my_project +Is a point inside of the circle\?", run("cd my_project && python -m safetrain", tmp_path)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_comes_to_what_its_first_lines_say(recipe: str, tmp_path: Path) -> None:
    head = (ROOT / f"configs/recipe/{recipe}.yaml").read_text().partition("\n\n")[0]
    command = re.search(r"^# +(python -m safetrain recipe=\w+)$", head, flags=re.MULTILINE)
    goals = re.findall(r"(val/\w+) ([<>]) (\d+(?:\.\d+)?)", head)
    assert command is not None
    assert goals
    shown = run(f"{command[1]} device=cpu", tmp_path)
    assert f"{recipe}: 2 ranks" in shown
    metrics = metrics_of(tmp_path)
    for name, relation, limit in goals:
        assert {"<": operator.lt, ">": operator.gt}[relation](metrics[name], float(limit)), (name, metrics)
    if recipe == "gpt_ddp":
        assert "\ndef " in shown
    if recipe == "stream_ddp":
        (run_dir,) = tmp_path.glob("outputs/stream_ddp/*")
        counted = run(f"python -m safetrain.recipes.stream_ddp {run_dir}", tmp_path)
        assert counted.splitlines() == [f"epoch {epoch}: 1,437 samples" for epoch in range(8)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "fault", "ranks", "end", "words"),
    [
        ("gpt_ddp", "raise", 2, "ended", "rank 1"),
        ("stream_ddp", "raise at=dataset loader.num_workers=2", 2, "ended", "rank 1"),
        ("gan_ddp", "skip", 4, "went on", "SkipBatch: injected by safetrain.chaos"),
        ("finetune_ddp", "raise at=on_epoch_start", 4, "ended", "rank 3"),
        ("finetune_ddp", "sigkill", 2, "ended", "rank 1"),
    ],
)
def test_a_fault_on_the_last_rank(recipe: str, fault: str, ranks: int, end: str, words: str, tmp_path: Path) -> None:
    shown = run(
        f"python -m safetrain.chaos recipe={recipe} fault={fault} rank=-1 ranks={ranks} device=cpu loop.max_steps=30",
        tmp_path,
    )
    assert re.search(rf": {end} after [\d.]+ s, exit code \d+, named$", shown, flags=re.MULTILINE) or end == "went on"
    assert f": {end} after " in shown
    assert words in shown
