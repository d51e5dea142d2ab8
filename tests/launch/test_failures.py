"""A rank fails: all ranks end soon, and one summary names the culprit."""

from __future__ import annotations

import re
from html import escape

import pytest

from tests.launch.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CASES = [pytest.param(2, 0, id="2 ranks, rank 0"), pytest.param(4, 3, id="4 ranks, the last one")]


def fail(project: Project, fault: str, ranks: int, on: int, *more: str) -> str:
    """Run the job; what it printed as its summary."""
    done = project.run(
        "recipe=mine", f"trainer.fault={fault}", f"trainer.culprit={on}", f"launch.nproc_per_node={ranks}", *more
    )
    assert done.code == 1
    (run_dir,) = project.run_dirs()
    assert done.err == (run_dir / "failure.txt").read_text()
    assert f"<title>{escape(done.err.splitlines()[0][:120])}</title>" in (run_dir / "failure.html").read_text()
    assert project.gone()
    return done.err


def others(ranks: int, culprit: int) -> str:
    names = [str(rank) for rank in range(ranks) if rank != culprit]
    if len(names) == 1:
        return f"Rank {names[0]} did not fail: ended because rank {culprit} did."
    return f"Ranks {names[0]}-{names[-1]} did not fail: ended because rank {culprit} did."


@pytest.mark.parametrize(("ranks", "on"), CASES)
def test_an_exception_is_told_once_with_its_line(project: Project, ranks: int, on: int) -> None:
    text = fail(project, "error", ranks, on)
    lines = (project.folder / "mine.py").read_text().splitlines()
    line = next(number for number, code in enumerate(lines, start=1) if "bad label 12" in code)
    assert re.match(rf"Training failed on rank {on} at step 1 in training_step \(\S+, process \d+\)\.\n", text)
    assert f"  {project.folder}/mine.py:{line}\n    ValueError: bad label 12\n" in text
    assert text.count("Traceback (most recent call last)") == 1
    assert "torch/" not in text
    assert others(ranks, on) in text
    assert f"logs/rank_{on}.log" in text


def test_a_sharded_model_whose_others_are_inside_its_forward(project: Project) -> None:
    """They gather parameters and wait for rank 1; nothing can end that for them but the end of the job."""
    text = fail(project, "error", 2, 1, "strategy=fsdp")
    assert re.match(r"Training failed on rank 1 at step 1 in training_step \(\S+, process \d+\)\.\n", text)
    assert "ValueError: bad label 12" in text
    assert others(2, 1) in text


@pytest.mark.parametrize(("ranks", "on"), CASES)
def test_a_killed_rank_is_the_culprit_not_those_that_miss_it(project: Project, ranks: int, on: int) -> None:  # H35
    text = fail(project, "die", ranks, on)
    assert re.match(rf"Training failed: rank {on} \(process \d+\) was killed by SIGKILL\.", text)
    assert others(ranks, on) in text
    assert "Traceback" not in text


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "on"), CASES)
def test_a_rank_that_leaves_without_a_word_is_told_by_its_exit_code(project: Project, ranks: int, on: int) -> None:
    text = fail(project, "leave", ranks, on)
    assert re.match(rf"Training failed: rank {on} \(process \d+\) left with exit code 3", text)
    assert others(ranks, on) in text


@pytest.mark.exhaustive
def test_a_rank_that_leaves_with_success_before_the_end_has_failed(project: Project) -> None:
    text = fail(project, "leave_quietly", 2, 1)
    assert re.match(r"Training failed: rank 1 \(process \d+\) left with exit code 0 before the others", text)


@pytest.mark.exhaustive
def test_sys_exit_in_user_code_is_a_failure(project: Project) -> None:
    assert "SystemExit: 7" in fail(project, "system_exit", 2, 1)


def test_a_rank_that_ignores_signals_is_gone_after_the_grace(project: Project) -> None:  # H30, H34
    # rank 1 leaves; rank 0 neither hears a signal nor comes to the collective
    (project.folder / "mine.py").write_text(
        (project.folder / "mine.py").read_text().replace("self.comm.rank == self.culprit and", "")
    )
    process = project.start("recipe=mine", "trainer.fault=hold_on", "launch.grace_s=0.5")
    project.wait_until_training()
    done = project.finish(process)
    assert done.code == 1
    assert done.seconds < 25  # torch alone would wait for 30 s
    assert re.match(r"Training failed: rank 1 \(process \d+\) left with exit code 3", done.err)


@pytest.mark.exhaustive
def test_a_thread_that_goes_on_keeps_no_failed_rank_alive(project: Project) -> None:  # H28, H29
    text = fail(project, "error_beside_a_thread", 2, 1)
    assert "  ValueError: bad label 13\n" in text
    assert others(2, 1) in text


def test_an_error_while_the_trainer_is_built_keeps_its_type_and_place(project: Project) -> None:
    (project.folder / "model.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self, width):\n"
        "        if width > 2:\n            raise ValueError('too wide')\n        super().__init__(4, width)\n"
    )
    recipe = project.folder / "recipe" / "mine.yaml"
    recipe.write_text(
        recipe.read_text().replace("torch.nn.Linear, in_features: 4, out_features: 2", "model.Net, width: 3")
    )
    done = project.run("recipe=mine")
    assert done.code == 1
    assert done.err.startswith("Training failed on ranks 0 and 1 (")
    assert f"  {project.folder}/model.py:6\n    ValueError: too wide\n" in done.err
    assert "(while building model)" in done.err
    assert "hydra" not in done.err
