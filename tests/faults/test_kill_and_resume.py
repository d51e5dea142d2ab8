"""A long run that is killed at random instants and resumed each time: the benchmark's own code, for four minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kill_and_resume import kill_and_resume


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_fifty_kills(tmp_path: Path) -> None:
    report = kill_and_resume(tmp_path, kills=50, seed=1, limit_s=240)
    assert not report.wrong
    assert report.killed.total() >= 5, "the machine is too slow for this to be a test"
    assert 0 < report.steps[-1] <= report.total_steps
