"""Any fault ends a real job in time, with nothing left behind and words to act on; or does not end it at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gauntlet import CASES, Case, run, shortcomings, write_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(case: Case, tmp_path: Path) -> None:
    write_project(tmp_path)
    outcome = run(case, tmp_path)
    assert not shortcomings(case, outcome), outcome["said"]
