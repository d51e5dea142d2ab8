"""docs/performance.md: its command and its script run in README's folder, and leave the trace that it describes."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from safetrain.config import Profile
from safetrain.errors import ConfigError
from safetrain.testing import run_ranks
from tests.launch.test_readme import run, with_shown_files

PAGE = (Path(__file__).parents[2] / "docs/performance.md").read_text()
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_shown_files(tmp_path)


def lanes(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(event["args"]["name"].partition(" (")[0] for event in events if event["name"] == "process_name")


@pytest.mark.slow
def test_the_command_leaves_one_trace_and_says_where(folder: Path) -> None:
    _, command = re.findall(r"```bash\n(.*?)\n```", PAGE)
    printed = run(command, folder)
    (trace,) = folder.glob("outputs/spirals/*/traces/*")
    assert trace.name == "steps_20-24.json.gz"
    assert f"profile: steps 20-24 of 2 ranks in {trace.relative_to(folder)} (" in printed
    assert lanes(trace) == ["rank 0", "rank 1"]
    (shown,) = re.findall(r"```\n(profile: .*?)```", PAGE, flags=re.DOTALL)
    beginnings = [line[:12] for line in shown.splitlines()]
    assert len(beginnings) == 5
    assert [line[:12] for line in printed.splitlines() if line[:12] in beginnings] == beginnings
    assert re.search(r"memory at its peak: [\d.]+ [MG]iB of [\d.]+ GiB on the host", printed)


@pytest.mark.slow
def test_tune_tries_ways_and_leaves_nothing(folder: Path) -> None:
    command, _ = re.findall(r"```bash\n(.*?)\n```", PAGE)
    printed = run(command, folder)
    (shown,) = re.findall(r"```\n( +ms a step .*?)```", PAGE, flags=re.DOTALL)
    for line in shown.splitlines():  # spirals' model has one bucket, whatever its size: those keys are not tried
        beginning = line.strip()[:14]
        if "bucket_cap_mb" not in line and not re.match(r" +\d", line):
            assert beginning in printed or "tried again" in printed, beginning
    assert re.search(r"^ {5}0 +0\.0\d +\d", printed, flags=re.MULTILINE), printed
    assert not list(folder.glob("outputs/*"))


def script(_comm: Any, folder: Path) -> list[str]:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(block, {})
    return [path.name for path in Path("outputs/mine/traces").iterdir()]


def test_the_script_does_the_same(folder: Path) -> None:
    run_ranks(script, 2, folder)
    assert lanes(folder / "outputs/mine/traces/steps_20-24.json.gz") == ["rank 0", "rank 1"]


def test_nsight_needs_a_gpu() -> None:
    options = Profile(tool="nsight")
    with pytest.raises(ConfigError, match="profile=nsight needs a GPU, and ranks compute on CPUs here: profile=steps"):
        options.check_device(gpus=False)
    options.check_device(gpus=True)
    Profile(tool="torch").check_device(gpus=False)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tool": "torhc"}, "profile.tool='torhc': must be one of none, torch, nsight. Did you mean torch?"),
        ({"count": 0}, "profile.count=0: must be at least 1"),
        ({"start": -1}, "profile.start=-1: must be at least 0"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Profile(**wrong)
    assert str(refused.value) == words
