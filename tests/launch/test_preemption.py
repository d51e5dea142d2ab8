"""SIGTERM as a scheduler sends it, to whom and whenever: all leave with 75, and what was saved is good."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.checkpoint import find
from safetrain.testing import differences
from tests.launch.project import Command, Project
from tests.launch.test_resume import events, newest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = ("recipe=mine", "loop.max_steps=null", "loop.epochs=3", "checkpoint.every_minutes=null")
ENDS_WITHIN_S = 25.0  # less than the grace: nobody was killed, on however loaded a machine

Send = Callable[[Project, "subprocess.Popen[str]"], None]


def to_launcher(_project: Project, process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)


def to_all(_project: Project, process: subprocess.Popen[str]) -> None:
    """What Slurm does."""
    os.killpg(process.pid, signal.SIGTERM)


def to_rank(rank: int) -> Send:
    def send(project: Project, _process: subprocess.Popen[str]) -> None:
        [pid] = [pid for pid in project.ranks() if rank_of(pid) == rank]
        os.kill(pid, signal.SIGTERM)

    return send


def rank_of(pid: int) -> int | None:
    """Of a rank's own process, not of its loader processes or the launcher."""
    if b"safetrain.rank" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        return None
    found = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    return int(found[1]) if found else None


def preempt(project: Project, send: Send, *job: str, ranks: int = 2) -> Command:
    """Send the signal while the culprit waits in its step; then let it go on."""
    process = project.start(*LONG, *job, "trainer.fault=wait", f"launch.nproc_per_node={ranks}")
    project.wait_for(lambda: bool(list(project.folder.glob("outputs/*/*/waiting"))), "the wait")
    send(project, process)
    (project.folder / "go_on").touch()
    return project.finish(process)


@pytest.mark.parametrize(
    ("send", "told", "ranks", "culprit"),
    [
        (to_launcher, "ranks 0 and 1", 2, 0),
        pytest.param(to_all, "ranks 0-3", 4, 3, marks=pytest.mark.exhaustive),
        pytest.param(to_rank(0), "rank 0", 2, 1, marks=pytest.mark.exhaustive),
        pytest.param(to_rank(3), "rank 3", 4, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_all_leave_at_the_next_step_and_the_run_goes_on(
    project: Project, send: Send, told: str, ranks: int, culprit: int
) -> None:
    done = preempt(project, send, "trainer.at=1", f"trainer.culprit={culprit}", ranks=ranks)
    assert done.code == 75
    assert done.seconds < ENDS_WITHIN_S
    assert project.gone()
    [run_dir] = project.run_dirs()
    step = newest(run_dir).step
    assert 2 <= step <= 4
    assert done.err.startswith(f"Preempted: {told} got SIGTERM; all ranks stopped together after step {step}, and the")
    assert "resume=auto" in done.err
    facts = json.loads((run_dir / "failure.json").read_text())
    assert (facts["exit_code"], facts["text"]) == (75, done.err)
    again = project.run(*LONG, "resume=auto", f"launch.nproc_per_node={ranks}")
    assert again.code == 0, again.err
    assert project.run_dirs() == [run_dir]
    assert not (run_dir / "failure.json").exists()

    whole = project.run(*LONG, "hydra.run.dir=whole", f"launch.nproc_per_node={ranks}")
    assert whole.code == 0, whole.err
    assert not differences(newest(run_dir).shared["model"], newest(project.folder / "whole").shared["model"])
    if ranks == 2:
        assert trained(run_dir) == trained(project.folder / "whole")


def trained(run_dir: Path) -> list[object]:
    return [event for event in events(run_dir) if event["kind"] in ("train", "validation")]


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.exhaustive), 9])
def test_a_rank_that_is_stuck_costs_the_grace_and_no_checkpoint(project: Project, at: int) -> None:
    """In the first step there is none; later the last one is as good as it was."""
    process = project.start(*LONG, "trainer.fault=wait", f"trainer.at={at}", "launch.preemption_grace_s=1")
    project.wait_for(lambda: bool(list(project.folder.glob("outputs/*/*/waiting"))), "the wait")
    to_all(project, process)
    done = project.finish(process)
    assert done.code == 75
    assert done.seconds < ENDS_WITHIN_S
    assert project.gone()
    [run_dir] = project.run_dirs()
    assert done.err.startswith("Interrupted by SIGTERM; no rank is left.")
    assert ("nothing was saved, it begins anew." if at == 0 else "resume=auto: it goes on from step_8.") in done.err
    if at:
        path, manifest = find(run_dir)
        assert (path.name, manifest.step) == ("step_8", 8)


@pytest.mark.exhaustive
def test_told_in_validation(project: Project) -> None:
    """It is left; who goes on runs it again."""
    process = project.start(*LONG, "trainer.fault=wait_in_validation", "trainer.at=4")
    project.wait_for(lambda: bool(list(project.folder.glob("outputs/*/*/waiting"))), "the wait")
    to_launcher(project, process)
    done = project.finish(process)
    assert done.code == 75
    [run_dir] = project.run_dirs()
    assert newest(run_dir).step == 4
    assert "validation" not in [event["kind"] for event in events(run_dir)]


@pytest.mark.exhaustive
def test_a_sweep_ends_with_its_job(project: Project) -> None:
    process = project.start("-m", *LONG, "trainer.fault=wait", "seed=1,2")
    project.wait_for(lambda: bool(list(project.folder.glob("outputs/multirun/*/0/waiting"))), "the wait")
    to_launcher(project, process)
    (project.folder / "go_on").touch()
    assert project.finish(process).code == 75
    assert [run_dir.name for run_dir in project.run_dirs()] == ["0"]
