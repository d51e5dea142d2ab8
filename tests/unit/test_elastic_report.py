"""torch's own reader of the file (2.13) takes the culprit for the root cause, whoever was noticed first."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from safetrain.elastic_report import note_for_torchrun
from safetrain.failure import Failure


@pytest.mark.parametrize("victim_writes", [True, False])
@pytest.mark.parametrize("culprit", [0, 3])
def test_the_culprit_is_the_root_cause(
    culprit: int, victim_writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        raise ValueError("no such label: 7")
    except ValueError as error:
        own = replace(Failure.of(error, culprit, victim=False), step=4)
    victim = Failure.of(ConnectionError("closed by peer"), 1, victim=True)
    files = {culprit: tmp_path / "culprit.json", 1: tmp_path / "victim.json"}
    for failure in (own, victim):
        if failure is own or victim_writes:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[failure.rank]))
            note_for_torchrun(failure)
    # noticed in this order: the victim first, and in the same second
    monkeypatch.setattr(time, "time", lambda: own.time_ns / 1e9)
    ends = {rank: ProcessFailure(rank, 100 + rank, 1, str(files[rank])) for rank in (1, culprit)}
    report = ChildFailedError("train", ends)
    assert report.get_first_failure()[0] == culprit
    root = str(report).partition("Root Cause")[2]
    assert f"rank {culprit} failed at step 4 at {__file__}:" in root
    assert "ValueError: no such label: 7" in root
    assert ("rank 1 is not the cause" in str(report)) == victim_writes


def test_without_an_elastic_agent_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    note_for_torchrun(Failure.of(ValueError("no"), 0, victim=False))
    assert not list(tmp_path.iterdir())
