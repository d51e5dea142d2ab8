"""Ranks that another launcher started: rank 0 composes for all, and what cannot be right is refused."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from omegaconf import OmegaConf

from tests.launch.project import Command, Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "safetrain"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def by_hand(project: Project, places: list[tuple[int, int]], *arguments: str) -> list[Command]:
    """Processes with RANK and WORLD_SIZE set by hand, all at the same time."""
    port = str(free_port())
    processes = [
        project.start(
            *arguments,
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank, size in places
    ]
    return [project.finish(process) for process in processes]


def test_torchrun_makes_one_run_directory_and_resolves_once(project: Project) -> None:
    # H102, H104, H105: a resolver that draws, and one that reads the clock, would differ by rank
    (project.folder / "mine.py").write_text(
        (project.folder / "mine.py").read_text() + "\n    def build_val_data(self):\n"
        "        Path(self.run_dir, f'seen_{self.comm.rank}').write_text(self.config_text)\n"
        "        return super().build_val_data()\n"
    )
    (project.folder / "sitecustomize.py").write_text(
        "import os, uuid\n"
        "if os.environ.get('RANK'):\n"
        "    from omegaconf import OmegaConf\n"
        "    OmegaConf.register_new_resolver('draw', lambda: uuid.uuid4().hex)\n"
    )
    overrides = ["recipe=mine", "+vars.drawn=${draw:}", "+vars.clock=${now:%f}"]
    (notes := project.folder / "notes").mkdir()
    done = project.run(*overrides, program=TORCHRUN, PYTHONPATH=str(project.folder), TMPDIR=str(notes))
    assert done.code == 0
    assert not list(notes.glob("safetrain_*"))
    (run_dir,) = project.run_dirs()
    seen = [(run_dir / f"seen_{rank}").read_text() for rank in (0, 1)]
    assert seen[0] == seen[1] == (run_dir / "config.yaml").read_text()
    assert len(OmegaConf.create(seen[0]).vars.drawn) == 32
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert json.loads((run_dir / "result.json").read_text())["step"] == 3
    assert len(list(project.folder.glob("outputs/*/*"))) == 1


def test_a_config_that_rank_0_refuses_ends_all_with_one_message(project: Project) -> None:
    done = project.run("recipe=mine", "loop.epchs=3", program=TORCHRUN)
    assert done.code == 1  # torchrun's own, whatever the ranks say
    assert done.err.count("loop.epchs=3: no such key. Did you mean epochs?") == 1
    assert project.run_dirs() == []


@pytest.mark.exhaustive
def test_ranks_set_by_hand_train_and_are_refused_together(project: Project) -> None:
    assert [done.code for done in by_hand(project, [(0, 2), (1, 2)], "recipe=mine")] == [0, 0]
    refused = by_hand(project, [(0, 2), (1, 2)], "recipe=mine", "model.in_feature=3")
    assert [done.code for done in refused] == [2, 2]
    assert "model.in_feature=3: no such key. Did you mean in_features?" in refused[0].err
    assert refused[1].err == ""
    shown = by_hand(project, [(0, 2), (1, 2)], "recipe=mine", "--cfg", "job")
    assert [done.code for done in shown] == [0, 0]
    assert "mine.Mine" in shown[0].out
    assert shown[1].out == ""


@pytest.mark.exhaustive
def test_tasks_of_srun_are_ranks(project: Project) -> None:
    step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    tasks = [project.start("recipe=mine", **step, SLURM_PROCID=str(n), SLURM_LOCALID=str(n)) for n in (0, 1)]
    done = [project.finish(task) for task in tasks]
    assert [command.code for command in done] == [0, 0], done
    assert done[0].out.startswith("mine: 2 ranks, outputs/mine/")
    (run_dir,) = project.run_dirs()
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_a_failing_rank_tells_its_own_story(project: Project) -> None:
    done = by_hand(project, [(0, 2), (1, 2)], "recipe=mine", "trainer.fault=error", "trainer.culprit=1")
    assert [command.code for command in done] == [1, 1]
    assert done[1].err.startswith("Training failed on rank 1 at step 1 in training_step")
    assert "Traceback" not in done[0].err


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            "RANK=0, WORLD_SIZE=2 and SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2 say different things",
        ),
    ],
)
def test_an_environment_that_no_launcher_makes_is_refused(
    project: Project, environment: dict[str, str], message: str
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if "RANK" in environment else {}
    done = project.run("recipe=mine", **environment, **address)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


@pytest.mark.exhaustive
def test_two_processes_of_one_rank_are_refused(project: Project) -> None:
    # what a program does that torchrun started and that spawns ranks itself
    (project.folder / "spawns.py").write_text(
        "import subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'safetrain', 'recipe=mine', 'trainer.fault=sleep']\n"
        "both = [subprocess.Popen(command) for _ in range(2)]\n"
        "while all(process.poll() is None for process in both):\n"
        "    time.sleep(0.05)\n"
        "for process in both:\n"
        "    process.kill()\n"
    )
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "spawns.py"]
    done = project.run(program=program)
    assert "two processes have RANK=0" in done.err
    assert "Use one launcher." in done.err


@pytest.mark.exhaustive
def test_a_sweep_needs_our_launcher(project: Project) -> None:
    done = project.run("-m", "recipe=mine", "seed=1,2", program=TORCHRUN)
    assert done.err.count("a sweep needs a launcher of its own for each job") == 1
    assert project.run_dirs() == []
