"""Ordinary jobs: from the command to the result, one after the other and at the same time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_users_folder_trains_by_one_command(project: Project) -> None:
    done = project.run("recipe=mine")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("mine: 2 ranks, outputs/mine/")
    (run_dir,) = project.run_dirs()
    result = json.loads((run_dir / "result.json").read_text())
    assert result["step"] == 3
    assert result["metric"] == result["metrics"]["val/loss"]
    assert {path.name for path in run_dir.iterdir()} >= {".hydra", "config.yaml", "logs", "result.json"}
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.exhaustive
def test_one_rank_goes_the_same_way(project: Project) -> None:
    done = project.run("recipe=mine", "launch.nproc_per_node=1")
    assert (done.code, done.err) == (0, "")
    (run_dir,) = project.run_dirs()
    assert [path.name for path in (run_dir / "logs").iterdir()] == ["rank_0.log"]
    assert json.loads((run_dir / "result.json").read_text())["step"] == 3


@pytest.mark.exhaustive
def test_jobs_at_the_same_time_have_ports_and_directories_of_their_own(project: Project) -> None:
    processes = [project.start("recipe=mine", "launch.nproc_per_node=2") for _ in range(3)]
    assert [project.finish(process).code for process in processes] == [0, 0, 0]
    assert len(project.run_dirs()) == 3


@pytest.mark.exhaustive
def test_files_named_like_pythons_own_modules_break_nothing(project: Project) -> None:
    for name in ("queue", "random", "types", "logging", "tempfile", "socket", "token", "platform", "typing", "enum"):
        # what the interpreter imports before any code of ours runs is out of reach; these come after
        if name not in ("types", "enum", "typing"):
            (project.folder / f"{name}.py").write_text("raise RuntimeError('the wrong file was imported')\n")
    done = project.run("recipe=mine", "loader.num_workers=1")
    assert (done.code, done.err) == (0, "")


@pytest.mark.exhaustive
def test_variables_of_the_config_reach_the_ranks(project: Project) -> None:
    (project.folder / "mine.py").write_text(
        (project.folder / "mine.py").read_text()
        + "\n    def build_val_data(self):\n        Path(self.run_dir, 'seen').write_text(os.environ['MY_FLAG'])\n"
    )
    assert project.run("recipe=mine", "+env.MY_FLAG=7", "metric=null").code == 0
    (run_dir,) = project.run_dirs()
    assert Path(run_dir, "seen").read_text() == "7"


@pytest.mark.exhaustive
def test_a_metric_that_is_never_logged_is_an_error(project: Project) -> None:
    done = project.run("recipe=mine", "metric=val/los")
    assert done.code == 2
    assert "metric=val/los: was not logged. Did you mean val/loss? Logged: val/loss." in done.err


@pytest.mark.exhaustive
def test_the_same_directory_twice_does_not_mix_two_runs(project: Project) -> None:
    assert project.run("recipe=mine", "hydra.run.dir=fixed", "trainer.fault=error").code == 1
    assert (project.folder / "fixed" / "failure.txt").exists()
    assert project.run("recipe=mine", "hydra.run.dir=fixed").code == 0
    assert not (project.folder / "fixed" / "failure.txt").exists()
