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
@pytest.mark.exhaustive
def test_an_unknown_workload_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.step_cost", "mpl", "--results", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert "no workload mpl: there are mlp," in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.exhaustive
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


@pytest.mark.slow
def test_a_step_beside_the_trainers_that_are_installed(tmp_path: Path) -> None:
    """Here without the extra ``bench``: the hand-written loop and safetrain; their weights are compared, too."""
    command = [sys.executable, "-m", "benchmarks.peers", "mlp", "--steps", "20", "--rounds", "2"]
    options = ["--contenders", "bare loop", "safetrain", "--results", str(tmp_path)]
    subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True, timeout=100)
    (page,) = tmp_path.iterdir()
    table = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    _, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert [row[:3] for row in rows] == [["MLP 4x256", "1", "bare loop"], ["MLP 4x256", "1", "safetrain"]]
    for row in rows:
        assert [bool(MEASURE.fullmatch(cell)) for cell in row[3::2]] == [True, True]
        assert [bool(RATIO.fullmatch(cell)) for cell in row[4::2]] == [True, True]
    assert rows[0][4] == "1.000 [1.000, 1.000]"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_growth_has_a_row_for_each_number_of_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.growth", "2", "4", "--rounds", "1", "--results", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (page,) = tmp_path.iterdir()
    text = page.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [row[0] for row in rows] == ["2", "4"]
    assert all(len(row) == 9 for row in rows)
    assert "2,046" in text


@pytest.mark.slow
@pytest.mark.exhaustive
def test_starting_and_leaving(tmp_path: Path) -> None:
    contenders = ["nothing", "bare loop", "safetrain", "safetrain, its own launcher"]
    command = [sys.executable, "-m", "benchmarks.start_and_leave", "--rounds", "1", "--contenders", *contenders]
    subprocess.run([*command, "--results", str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=115)
    (page,) = tmp_path.iterdir()
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if "(" in line and line.startswith("| ")]
    assert [row[0] for row in rows] == contenders
    assert all(float(row[1].partition(" ")[0]) > 500 for row in rows), "milliseconds: torch alone takes a second"
    assert all(float(row[4].partition(" ")[0]) > 100 for row in rows), "MiB"
