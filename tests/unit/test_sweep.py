"""What a command knows of its sweep: the jobs' notes, their locks, the table; what each job gets of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from safetrain import part_of_machine, sweep_job
from safetrain.errors import ConfigError
from safetrain.marked import marked_output
from safetrain.part_of_machine import (
    forget_threads_of_engine,
    number_at_once,
    part_of_gpus,
    share,
    threads_of_rank,
    visible_gpus,
)
from safetrain.sweep import FAILED, OK, WRONG, Folder, Job, table


def job(name: str, exit_code: int | None = OK, metric: float | None = None, process: int = 1) -> Job:
    return Job(name, "command", process, os.uname().nodename, f"out/{name}", metric, exit_code)


def test_a_note_is_read_back_by_number(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    for number in (10, 9):
        folder.note(number, job(f"lr={number}", metric=0.5))
    folder.note(9, job("lr=9", FAILED))
    assert folder.jobs() == [(9, job("lr=9", FAILED)), (10, job("lr=10", metric=0.5))]
    assert folder.noted(11) is None
    assert Folder(str(tmp_path / "other")).jobs() == []


def test_the_table_says_how_each_job_ended() -> None:
    jobs = [job("a", metric=0.1234567), job("bb"), job("c", FAILED), job("d", WRONG), job("e", 75), job("f", None)]
    assert table([*jobs, job("g", 130)]) == [
        "",
        "a   0.123457     out/a",
        "bb  ok           out/bb",
        "c   failed       out/c",
        "d   refused      out/d",
        "e   preempted    out/e",
        "f   died         out/f",
        "g   interrupted  out/g",
    ]


def test_a_job_is_alive_while_its_process_holds_the_lock(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.note(0, job("a", None))
    assert folder.alive() == []
    with folder.held("0", wait=False) as got:
        assert got
        assert folder.alive() == [job("a", None)]
        with folder.held("0", wait=False) as again:
            assert not again
        folder.note(0, job("a", None, process=os.getpid()))  # not another process
        assert folder.alive() == []
    assert folder.alive() == []


def test_a_process_ends_with_its_sweep(tmp_path: Path) -> None:
    code = "import sys, time; from safetrain.sweep import Folder; Folder(sys.argv[1]).die_with_sweep(); time.sleep(60)"
    folder = Folder(str(tmp_path))
    with folder.held("sweep"):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert process.wait(60) == 130


def test_a_sweep_that_was_told_to_end_goes_on_once(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.begin()
    assert (folder.is_ending(), folder.goes_on()) == (False, False)
    folder.end()
    assert folder.is_ending()
    folder.begin()
    assert (folder.is_ending(), folder.goes_on()) == (False, True)
    folder.begin()
    assert not folder.goes_on()


def test_only_a_job_that_was_cut_and_saved_goes_on(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(run_dir=str(tmp_path), resume="none")
    assert not sweep_job._was_cut(job("a", 75), config)
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    assert sweep_job._was_cut(job("a", 75), config)
    assert sweep_job._was_cut(job("a", None), config)
    assert not sweep_job._was_cut(job("a", FAILED), config)
    config.resume = "else/where"
    assert not sweep_job._was_cut(job("a", 75), config)


@pytest.mark.parametrize(("asked", "cores", "jobs"), [(2, 8, 2), (-1, 8, 8), (-2, 8, 7), (-9, 8, 1)])
def test_jobs_at_once_are_counted_as_joblib_does(
    monkeypatch: pytest.MonkeyPatch, asked: int, cores: int, jobs: int
) -> None:
    monkeypatch.setattr(part_of_machine, "number_of_cores", lambda: cores)
    assert number_at_once(asked) == jobs


def test_each_job_at_once_sees_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,GPU-7,9")
    folder, gpus = Folder(str(tmp_path)), visible_gpus(5)
    with part_of_gpus(folder, 2, gpus):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
        with part_of_gpus(folder, 2, gpus):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,GPU-7"
            with pytest.raises(ConfigError, match="no GPU is left"), part_of_gpus(folder, 2, gpus):
                pass
    with part_of_gpus(folder, 2, gpus):  # given back
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3,5,GPU-7,9"


def test_more_jobs_at_once_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 jobs at once on 2 GPUs.* Allowed here: 1-2; any number with device=cpu"):
        part_of_gpus(Folder(str(tmp_path)), 4, ["0", "1"]).__enter__()


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_no_gpu_is_in_two_parts(parts: int) -> None:
    gpus = [*"01234567"]
    given = [gpu for part in range(parts) for gpu in share(gpus, part, parts)]
    assert len(given) == len(set(given)) == parts * (8 // parts)


def test_threads_are_shared_by_jobs_and_ranks_unless_the_user_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # joblib: all of a job's cores
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert threads_of_rank(8, 2) == {}
    forget_threads_of_engine({"MKL_NUM_THREADS": "3"})
    assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["MKL_NUM_THREADS"] == "3"
    assert threads_of_rank(8, 2) == {"OMP_NUM_THREADS": "4"}
    assert threads_of_rank(1, 2) == {"OMP_NUM_THREADS": "1"}
    assert threads_of_rank(None, 2) == {}


def test_every_line_is_marked_also_a_childs_and_the_last_without_an_end(capfd: pytest.CaptureFixture[str]) -> None:
    with marked_output("[job 3] "):
        os.write(1, b"one\n\ntwo\n")
        subprocess.run([sys.executable, "-c", "import sys; print('three'); sys.stderr.write('four')"], check=True)
    os.write(1, b"plain\n")
    out, err = capfd.readouterr()
    assert out == "[job 3] one\n[job 3] \n[job 3] two\n[job 3] three\nplain\n"
    assert err == "[job 3] four\n"


@pytest.fixture
def hydra() -> Iterator[None]:
    OmegaConf.register_new_resolver("run_dir", lambda parent, resume="none": f"{parent}/run", replace=True)
    with initialize_config_module("safetrain.configs", version_base="1.3"):
        yield


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ("launcher=joblib", "n_jobs"),
        ("launcher=submitit_local", "timeout_min"),
        ("launcher=submitit_slurm", "partition"),
        ("sweeper=optuna", "n_trials"),
    ],
)
@pytest.mark.usefixtures("hydra")
def test_every_engine_composes(engine: str, key: str) -> None:
    group = engine.partition("=")[0]
    config = compose("train", overrides=[f"hydra/{engine}", "recipe=resnet_ddp"], return_hydra_config=True)
    assert key in config.hydra[group]
    assert config.hydra.callbacks.sweep._target_ == "safetrain.sweep.Sweep"


@pytest.mark.usefixtures("hydra")
def test_the_page_about_slurm_composes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/sweeps.md").read_text()
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset/slurm.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    asked = [f"hydra.searchpath=[file://{tmp_path}]", "recipe=resnet_ddp", "preset=slurm"]
    launcher = compose("train", overrides=asked, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (1, 1, 4)


@pytest.mark.parametrize("key", ["nodes", "tasks_per_node"])
def test_several_tasks_of_submitit_are_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    hydra = OmegaConf.create({"mode": "MULTIRUN", "launcher": {"nodes": 1, "tasks_per_node": 1, key: 2}})
    monkeypatch.setattr(sweep_job, "HydraConfig", SimpleNamespace(get=lambda: hydra))
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    config: Any = SimpleNamespace(metric="val/loss", device="cpu")
    with pytest.raises(ConfigError, match=rf"hydra\.launcher\.{key}=2: each of these tasks would be the whole job"):
        sweep_job._check_engine(config)
    monkeypatch.delenv("SUBMITIT_EXECUTOR")
    sweep_job._check_engine(config)
