"""Scripts that know nothing of safetrain, under torchrun and the guard: by hand, and with three frameworks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import command_of

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 120.0
LEFT_S = 7.0  # a killed rank's loader processes look every 5 s
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def guarded(folder: Path, script: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, terminal, and what is in ``failure.json``, if it is there; nothing is left running."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--stall-s", "3", "--first-stall-s", "20", "--run-dir", str(folder / "run")]
    command = [*torchrun, "-m", "safetrain.guard", *options, str(SCRIPTS / f"{script}.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    print(done.stdout, done.stderr)
    deadline = time.monotonic() + LEFT_S
    while (left := _left(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    file = folder / "run" / "failure.json"
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text()) if file.exists() else {}


def _left(mark: str) -> list[str]:
    commands = [command_of(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [command for command in commands if mark in command and "safetrain.guard" in command]


def line_of(script: str, mark: str) -> str:
    file = SCRIPTS / f"{script}.py"
    return f"{file}:{next(n for n, t in enumerate(file.read_text().splitlines(), 1) if t.endswith(f'# line: {mark}'))}"


@pytest.mark.exhaustive
def test_an_exception_is_told_once(tmp_path: Path) -> None:
    code, terminal, verdict = guarded(tmp_path, "ddp", "--fault", "raise")
    assert code == 1
    assert verdict["culprits"] == [1]
    assert verdict["place"] == line_of("ddp", "raise")
    assert terminal.count("ValueError: bad label 12") == 2  # what it is, and the end of its traceback


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_killed_rank(tmp_path: Path, culprit: int) -> None:
    code, terminal, verdict = guarded(tmp_path, "ddp", "--fault", "kill", "--culprit", str(culprit))
    assert code == 1
    assert verdict["culprits"] == [culprit]
    assert terminal.count("Training failed: rank") == 1
    assert f"Rank {1 - culprit} was in all_reduce of 5 floats (the default group), at" in verdict["text"]


FRAMEWORKS = {"lightning_script": "lightning", "accelerate_script": "accelerate", "transformers_script": "transformers"}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(FRAMEWORKS[request.param]) is None:  # not imported: it would change the environment
        pytest.skip("pip install '.[bench]'")
    return str(request.param)


@pytest.mark.exhaustive
def test_a_frameworks_script_runs(tmp_path: Path, framework: str) -> None:
    code, terminal, verdict = guarded(tmp_path, framework)
    assert code == 0
    assert "done" in terminal
    assert verdict == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_frameworks_rank_raises(tmp_path: Path, framework: str, culprit: int) -> None:
    code, _, verdict = guarded(tmp_path, framework, "--fault", "raise", "--culprit", str(culprit))
    assert code == 1
    assert verdict["culprits"] == [culprit]
    assert verdict["place"] == line_of(framework, "raise")


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_frameworks_rank_is_killed(tmp_path: Path, framework: str, culprit: int) -> None:
    code, _, verdict = guarded(tmp_path, framework, "--fault", "kill", "--culprit", str(culprit))
    assert code == 1
    assert verdict["culprits"] == [culprit]


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_frameworks_rank_sleeps(tmp_path: Path, framework: str, culprit: int) -> None:
    code, _, verdict = guarded(tmp_path, framework, "--fault", "sleep", "--culprit", str(culprit))
    assert code == 1
    assert verdict["culprits"] == [culprit]
    assert verdict["place"].startswith(line_of(framework, "sleep"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_frameworks_rank_is_alone_in_a_barrier(tmp_path: Path, framework: str, culprit: int) -> None:
    code, _, verdict = guarded(tmp_path, framework, "--fault", "alone", "--culprit", str(culprit))
    assert code == 1
    assert line_of(framework, "alone") in verdict["text"]
