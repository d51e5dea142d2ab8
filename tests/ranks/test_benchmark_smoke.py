"""The benchmarks run, check what they measure (equal weights, the last state saved), and write their tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURE = re.compile(r"-?\d+(\.\d+)? \(-?\d+(\.\d+)? to -?\d+(\.\d+)?\)")
RATIO = re.compile(r"\d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]")


@pytest.mark.slow
def test_the_command_writes_a_row_for_each_workload(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.step_cost", "mlp", "mlp_accumulate"]
    options = ["--steps", "3", "--rounds", "2", "--results", str(tmp_path)]
    subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True, timeout=100)

    (page,) = tmp_path.iterdir()
    assert re.fullmatch(r"step_cost_\d{4}-\d\d-\d\d_\d{4}\.md", page.name)
    table = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert header[:2] == ["workload", "accumulate"]
    assert set(rule) == {"---"}
    assert [row[:2] for row in rows] == [["MLP 4x256", "1"], ["MLP 4x256", "4"]]
    for row in rows:
        assert len(row) == len(header)
        for name, cell in list(zip(header, row, strict=True))[2:]:
            assert (RATIO if name.endswith("ratio") else MEASURE).fullmatch(cell), f"{name}: {cell}"


@pytest.mark.slow
def test_an_unknown_workload_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.step_cost", "mpl", "--results", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert "no workload mpl: there are mlp," in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_a_save_costs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.checkpoint_hold", "--megabytes", "2", "--rounds", "2"]
    subprocess.run([*command, "--results", str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=100)
    (page,) = tmp_path.iterdir()
    assert re.fullmatch(r"checkpoint_hold_\d{4}-\d\d-\d\d_\d{4}\.md", page.name)
    text = page.read_text(encoding="utf-8")
    assert "State: 2 MB" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "(" in line]
    assert [row[0].partition(" (")[0] for row in rows] == [
        "the copy alone", "asynchronous save", "synchronous save", "the first asynchronous save",
        "a step beside the writing", "a step without",
    ]  # fmt: skip
    assert all(MEASURE.fullmatch(row[1]) for row in rows)
