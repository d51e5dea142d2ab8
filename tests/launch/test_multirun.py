"""Sweeps: every job once, in a directory of its own; the metric goes to the sweeper; a failed job shows (H101)."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from tests.launch.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.exhaustive
def test_each_job_runs_once_and_its_metric_is_told(project: Project) -> None:
    done = project.run("-m", "recipe=mine", "optimizer.lr=0.1,0.01")
    assert (done.code, done.err) == (0, "")
    run_dirs = project.run_dirs()
    assert [run_dir.name for run_dir in run_dirs] == ["0", "1"]
    assert [OmegaConf.load(run_dir / "config.yaml").optimizer.lr for run_dir in run_dirs] == [0.1, 0.01]
    metrics = [json.loads((run_dir / "result.json").read_text())["metric"] for run_dir in run_dirs]
    table = done.out.splitlines()[-2:]
    assert table[0].split()[:3] == ["recipe=mine", "optimizer.lr=0.1", f"{metrics[0]:.6g}"]
    assert table[1].split()[:3] == ["recipe=mine", "optimizer.lr=0.01", f"{metrics[1]:.6g}"]
    assert metrics[0] != metrics[1]


@pytest.mark.exhaustive
def test_a_failed_job_shows_and_the_others_are_kept(project: Project) -> None:
    done = project.run("-m", "recipe=mine", "trainer.fault=error,''")
    assert done.code == 1
    assert done.err.count("ValueError: bad label 12") == 2  # the headline, and the end of the one traceback
    failed, passed = project.run_dirs()
    assert (failed / "failure.txt").exists()
    assert (passed / "result.json").exists()
    table = done.out.splitlines()[-2:]
    assert "failed" in table[0]
    assert "failed" not in table[1]


@pytest.mark.exhaustive
def test_a_wrong_value_refuses_its_job_only(project: Project) -> None:
    done = project.run("-m", "recipe=mine", "loop.max_steps=none,2")
    assert done.code == 2
    assert "loop.max_steps='none': must be a whole number or null, not text" in done.err
    (passed,) = project.run_dirs()
    assert json.loads((passed / "result.json").read_text())["step"] == 2


@pytest.mark.exhaustive
def test_a_sweeper_gets_the_metric(project: Project) -> None:
    plugins = project.folder / "hydra_plugins"  # where Hydra wants sweepers to live
    plugins.mkdir()
    (plugins / "search.py").write_text(
        "from pathlib import Path\n"
        "from hydra._internal.core_plugins.basic_sweeper import BasicSweeper\n"
        "class Search(BasicSweeper):\n"
        "    def sweep(self, arguments):\n"
        "        returns = super().sweep(arguments)\n"
        "        Path('told').write_text(repr([job.return_value for batch in returns for job in batch]))\n"
        "        return returns\n"
    )
    overrides = ["hydra.sweeper._target_=hydra_plugins.search.Search", "seed=1,2"]
    assert project.run("-m", "recipe=mine", *overrides, PYTHONPATH=str(project.folder)).code == 0
    metrics = [json.loads((run_dir / "result.json").read_text())["metric"] for run_dir in project.run_dirs()]
    assert (project.folder / "told").read_text() == repr(metrics)


@pytest.mark.exhaustive
def test_ctrl_c_ends_the_sweep_not_only_its_job(project: Project) -> None:
    process = project.start("-m", "recipe=mine", "trainer.fault=sleep", "seed=1,2")
    project.wait_for(lambda: len(list(project.folder.glob("outputs/multirun/*/0/stepping_*"))) == 2, "training")
    process.send_signal(2)
    done = project.finish(process)
    assert done.code == 130
    assert [run_dir.name for run_dir in project.run_dirs()] == ["0"]
