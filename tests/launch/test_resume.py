"""A job that was killed goes on by ``resume=``: the same command, the same directory, and in the end the same bytes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.kill_and_resume import events
from safetrain.checkpoint import Saved, find, read
from safetrain.testing import differences
from tests.launch.project import LIMIT_S, Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

THREE_EPOCHS = ("recipe=mine", "loop.max_steps=null", "loop.epochs=3", "loop.log_every_steps=3")
EVERY_TWO_STEPS = "checkpoint.every_steps=2"


def newest(run_dir: Path) -> Saved:
    return read(*find(run_dir))


def await_checkpoint(project: Project, name: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not list(project.folder.glob(f"outputs/mine/*/checkpoints/{name}")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_everything_is_killed_and_resume_auto_goes_on(project: Project) -> None:
    whole = project.run(*THREE_EPOCHS, EVERY_TWO_STEPS)
    assert whole.code == 0, whole.err
    [expected] = project.run_dirs()
    expected = expected.rename(project.folder / "whole")

    process = project.start(*THREE_EPOCHS, EVERY_TWO_STEPS, "trainer.fault=sleep", "trainer.at=7")
    await_checkpoint(project, "step_6")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert project.gone()
    [cut] = project.run_dirs()
    assert len(events(cut)) < len(events(expected))

    done = project.run(*THREE_EPOCHS, EVERY_TWO_STEPS, "resume=auto")
    assert done.code == 0, done.err
    assert project.run_dirs() == [cut]
    assert f"goes on from {cut / 'checkpoints' / 'step_6'}: 6 steps done, epoch 2" in done.out
    assert "trainer.fault: sleep then,  now; this run's holds from here on" in done.out
    assert newest(cut).step == newest(expected).step == 12
    assert not differences(newest(cut).shared, newest(expected).shared)
    assert not differences(newest(cut).own, newest(expected).own)
    assert events(cut) == events(expected)
    results = [json.loads((run_dir / "result.json").read_text()) for run_dir in (cut, expected)]
    assert results[0] == results[1]


@pytest.mark.exhaustive
def test_a_rank_is_killed_and_another_number_of_ranks_goes_on(project: Project) -> None:
    failed = project.run(*THREE_EPOCHS, EVERY_TWO_STEPS, "trainer.fault=die", "trainer.at=7", "trainer.culprit=1")
    assert failed.code == 1
    [run_dir] = project.run_dirs()
    start = newest(run_dir).step
    assert start in (4, 6)  # its death may have come before its part of step 6 was written
    done = project.run(*THREE_EPOCHS, f"resume={run_dir}", "launch.nproc_per_node=1")
    assert done.code == 0, done.err
    assert "2 ranks then, 1 now: each sample still comes once in the epoch" in done.out
    assert project.run_dirs() == [run_dir]
    left_of_second_epoch = 32 - 8 * (start - 4)  # samples
    assert newest(run_dir).step == start + left_of_second_epoch // 4 + 32 // 4
    assert newest(run_dir).epoch == 3
