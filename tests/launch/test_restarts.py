"""A job that failed goes on from its last checkpoint by itself, unless it would only fail again."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

from safetrain.testing import differences
from tests.launch.project import Project
from tests.launch.test_resume import EVERY_TWO_STEPS, THREE_EPOCHS, events, newest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOB = (*THREE_EPOCHS, EVERY_TWO_STEPS, "trainer.at=7")


def check_it_is_the_whole_run(project: Project) -> None:
    [run_dir] = project.run_dirs()
    done = project.run(*THREE_EPOCHS, EVERY_TWO_STEPS, "hydra.run.dir=whole")
    assert done.code == 0, done.err
    whole = project.folder / "whole"
    assert not differences(newest(run_dir).shared, newest(whole).shared)
    assert not differences(newest(run_dir).own, newest(whole).own)
    assert events(run_dir) == events(whole)


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_rank_that_was_killed_once(project: Project, culprit: int) -> None:
    done = project.run(*JOB, "trainer.fault=die_once", f"trainer.culprit={culprit}", "launch.max_restarts=2")
    assert done.code == 0, done.err
    [run_dir] = project.run_dirs()
    # its death may have come before its part of step 6 was written
    assert re.search(r"^Restart 1 of 2: it goes on from step_[46]\.$", done.out, re.MULTILINE)
    assert f"rank {culprit} (process" in (run_dir / "failure_1.txt").read_text()
    assert "was killed by SIGKILL" in done.err
    assert not (run_dir / "failure.txt").exists()
    check_it_is_the_whole_run(project)


def test_a_failure_that_comes_again_is_not_tried_a_third_time(project: Project) -> None:
    done = project.run(*JOB, "trainer.fault=error", "trainer.culprit=1", "launch.max_restarts=5")
    assert done.code == 1
    [run_dir] = project.run_dirs()
    assert done.err.count("Training failed on rank 1 at step 7 in training_step") == 2
    assert done.err.count("The state at step 7 is saved in checkpoints/step_7: go on with resume=auto.") == 2
    assert "Restart 1 of 5: it goes on from step_7.\n" in done.out
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).tolist()  # of the second epoch
    samples = order[1::2][12:16]
    at_hand = f"ank 1 was at samples {', '.join(map(str, samples))} of the dataset (batch 4 of epoch 2)."
    assert done.err.count(f"\n\nR{at_hand}\n\n") == 2
    again = done.err.rpartition("It failed in this way before, at the same place: no further restart.\n")[2]
    assert again.startswith(f"Both times r{at_hand} Look at these samples (failure.json has all of them), or leave")
    facts = json.loads((run_dir / "failure.json").read_text())
    assert [(one["rank"], one["samples"]) for one in facts["ranks"]] == [(0, []), (1, samples)]
    assert (run_dir / "failure_1.json").exists()
    assert not (run_dir / "failure_2.json").exists()

    # and with the fault mended the same command goes on from there, as the run would have that never failed
    mended = project.run(*THREE_EPOCHS, EVERY_TWO_STEPS, "resume=auto")
    assert mended.code == 0, mended.err
    assert "step_7: 7 steps done, epoch 2" in mended.out
    whole = project.run(*THREE_EPOCHS, EVERY_TWO_STEPS, "hydra.run.dir=whole")
    assert whole.code == 0, whole.err
    found, expected = newest(run_dir), newest(project.folder / "whole")
    assert found.step == expected.step == 12
    assert not differences(found.own, expected.own)
    for part in ("model", "optimizer/optimizer", "window"):
        assert not differences(found.shared[part], expected.shared[part], part)
    lines, wanted = ([e for e in events(d) if e["kind"] != "checkpoint"] for d in (run_dir, project.folder / "whole"))
    assert lines == wanted


@pytest.mark.exhaustive
def test_torchrun_starts_the_ranks_again(project: Project) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = project.run(*JOB, "trainer.fault=die_once", program=[*torchrun, "--max-restarts", "1", "-m", "safetrain"])
    assert done.code == 0, done.err
    check_it_is_the_whole_run(project)
