"""Sweeps on real engines: jobs at once, searches, other processes; how they end, and that a failed one shows (H101)."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.launch.project import Command, Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
SUBMITIT = ("hydra/launcher=submitit_local",)
LONG = ("loop.max_steps=1000000", "loop.epochs=1000000", "checkpoint.every_epochs=null")


def files(project: Project, pattern: str) -> list[Path]:
    return sorted(project.folder.glob(f"outputs/multirun/*/{pattern}"))


def wait_for(project: Project, pattern: str, count: int) -> None:
    project.wait_for(lambda: len(files(project, pattern)) >= count, f"{count} of {pattern}")


def table(done: Command) -> dict[str, str]:
    """How each job ended, by its run directory's number."""
    rows = [line.split() for line in (done.out + done.err).splitlines() if line.startswith("recipe=mine ")]
    return {Path(row[-1]).name: row[-2] for row in rows if "multirun" in row[-1]}


def metric(project: Project, number: int) -> float:
    (result,) = files(project, f"{number}/result.json")
    return json.loads(result.read_text())["metric"]


def test_two_jobs_at_once_keep_apart_and_a_failed_one_leaves_the_other_alone(project: Project) -> None:
    process = project.start("-m", "recipe=mine", *JOBLIB, "trainer.fault=fail_after_waiting,wait")
    wait_for(project, "*/waiting", 2)  # both are there: they run at once
    (project.folder / "go_on").touch()
    done = project.finish(process)
    assert done.code == 1
    assert table(done) == {"0": "failed", "1": f"{metric(project, 1):.6g}"}
    lines = done.err.splitlines()
    assert "[job 0]     ValueError: bad label 12" in lines
    assert [line for line in lines if not re.match(r"\[job 0\]|Error executing job with overrides:", line)] == []
    assert {line[:7] for line in done.out.splitlines() if "mine: 2 ranks" in line} == {"[job 0]", "[job 1]"}
    assert [path.parent.name for path in files(project, "*/failure.txt")] == ["0"]


@pytest.mark.exhaustive
def test_optuna_is_told_the_metric_and_that_a_job_failed(project: Project) -> None:
    sweeper = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_jobs=1"]
    space = ["trainer.at=choice(1,97,98)", "optimizer.lr=choice(0.1,0.01)"]
    limits = ["hydra.sweeper.n_trials=3", "hydra.sweeper.max_failure_rate=1.0", "loop.max_steps=2"]
    done = project.run("-m", "recipe=mine", "trainer.fault=error", *sweeper, *space, *limits)
    outcomes = {path.parent.name: path for path in files(project, "*/result.json")}
    failed = [path.parent.name for path in files(project, "*/failure.txt")]
    assert len(outcomes) + len(failed) == 3
    assert done.code == (1 if failed else 0)
    (results,) = files(project, "optimization_results.yaml")
    best = OmegaConf.load(results)
    metrics = {name: metric(project, int(name)) for name in outcomes}
    assert best.best_value == min(metrics.values())
    winner = min(metrics, key=lambda name: metrics[name])
    config = OmegaConf.load(outcomes[winner].with_name("config.yaml"))
    assert (config.optimizer.lr, config.trainer.at) == (
        best.best_params["optimizer.lr"],
        best.best_params["trainer.at"],
    )
    assert f"best: {best.best_value:.6g}  " in done.out


@pytest.mark.exhaustive
def test_a_search_without_a_metric_is_refused_before_a_process_starts(project: Project) -> None:
    done = project.run("-m", "recipe=mine", "hydra/sweeper=optuna", "metric=null", "seed=choice(1,2)")
    assert done.code == 2
    assert "metric=null: the sweeper chooses by it." in done.err
    assert "Traceback" not in done.err
    assert files(project, "*/logs") == []


@pytest.mark.exhaustive
def test_submitit_runs_jobs_elsewhere_and_their_verdict_is_told_here(project: Project) -> None:
    """As in a job of Slurm with one task, which is none of several that srun started."""
    slurm = {"JOB_ID": "7", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "NTASKS": "1", "STEP_NUM_TASKS": "1"}
    done = project.run(
        "-m", "recipe=mine", *SUBMITIT, "trainer.fault=error,''", **{f"SLURM_{k}": v for k, v in slurm.items()}
    )
    assert done.code == 1
    assert table(done) == {"0": "failed", "1": f"{metric(project, 1):.6g}"}
    assert "recipe=mine trainer.fault=error\nTraining failed on rank 0 at step 1 in training_step" in done.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", [JOBLIB, SUBMITIT], ids=["joblib", "submitit"])
def test_ctrl_c_ends_all_ranks_of_all_jobs(project: Project, engine: tuple[str, ...]) -> None:
    process = project.start("-m", "recipe=mine", *engine, "trainer.fault=sleep", "seed=1,2")
    wait_for(project, "*/stepping_*", 4)
    process.send_signal(signal.SIGINT)
    done = project.finish(process)
    assert done.code == 130
    assert project.gone()
    assert table(done) == {"0": "interrupted", "1": "interrupted"}
    assert "Interrupted; no job of the sweep is left." in done.err


@pytest.mark.exhaustive
def test_sigkill_of_the_command_ends_all_jobs_too(project: Project) -> None:
    process = project.start("-m", "recipe=mine", *JOBLIB, "trainer.fault=sleep", "seed=1,2")
    wait_for(project, "*/stepping_*", 4)
    process.kill()
    assert project.gone()


@pytest.mark.exhaustive
def test_sigterm_saves_all_jobs_and_the_same_sweep_goes_on(project: Project) -> None:
    process = project.start("-m", "recipe=mine", *JOBLIB, *LONG, "seed=1,2,3")
    wait_for(project, "*/stepping_*", 4)
    process.terminate()
    done = project.finish(process)
    assert done.code == 75
    assert table(done) == {"0": "preempted", "1": "preempted"}  # the third had not begun
    project.started.clear()
    (sweep_dir,) = files(project, "")
    assert f"What to do: run the same command with hydra.sweep.dir={sweep_dir.relative_to(project.folder)}" in done.err
    how = re.search(r"Run the same command with (hydra.sweep.dir=\S+):", done.err)
    assert how is not None
    steps = {path.parent.parent.name: path.resolve().name for path in files(project, "*/checkpoints/latest")}
    assert set(steps) == {"0", "1"}
    again = project.start("-m", "recipe=mine", *JOBLIB, *LONG, "seed=1,2,3", how[1])
    for number, step in steps.items():
        log = sweep_dir / number / "logs" / "rank_0.log"
        project.wait_for(lambda log=log, step=step: f"goes on from {sweep_dir}/" in log.read_text(), step)
    again.terminate()
    assert project.finish(again).code == 75


@pytest.mark.exhaustive
def test_a_job_that_submitit_puts_into_the_queue_again_goes_on(project: Project) -> None:
    process = project.start("-m", "recipe=mine", *SUBMITIT, *LONG, "seed=1,2")
    wait_for(project, "*/stepping_*", 4)
    (note,) = files(project, ".jobs/0.json")
    first = json.loads(note.read_text())["process"]
    os.kill(first, signal.SIGUSR2)  # what submitit arranges to get before the time is over
    (log,) = files(project, "0/logs/rank_0.log")
    project.wait_for(lambda: "goes on from" in log.read_text(), "the job's going on")
    assert json.loads(note.read_text())["process"] != first
    process.send_signal(signal.SIGINT)
    assert project.finish(process).code == 130
