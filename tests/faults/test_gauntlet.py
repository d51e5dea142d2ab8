"""Any fault ends a real job in time, with nothing left behind and words to act on; or does not end it at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gauntlet import CASES, Case, run, shortcomings, write_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


_EVERYDAY = {
    "raise-training_step-rank1of2-local",
    "disk_full-rank_zero-rank0of4-local",
    "sigkill-training_step-rank1of2-local",
    "sigkill-launcher_worker-rank1of2-local",
    "stuck-dataset_worker-rank1of2-local",
    "gil-training_step-rank1of2-local",
    "stray_collective-training_step-rank0of2-local",
}


def _cases() -> list[Any]:
    unknown = _EVERYDAY - set(map(str, CASES))
    assert not unknown, unknown
    return [pytest.param(case, marks=[] if str(case) in _EVERYDAY else pytest.mark.exhaustive) for case in CASES]


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_fault(case: Case, tmp_path: Path) -> None:
    write_project(tmp_path)
    outcome = run(case, tmp_path)
    assert not shortcomings(case, outcome), outcome["said"]
