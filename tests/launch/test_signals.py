"""Ctrl-C, hang-up, and the launcher killed: no process is left, and nothing but one line is printed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.project import Command, Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENDS_WITHIN_S = 5.0


def to_group(process: subprocess.Popen[str], number: int) -> None:
    """What a terminal does: the whole foreground group gets the signal."""
    os.killpg(process.pid, number)


def to_parent(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)


def ended_by(project: Project, process: subprocess.Popen[str], number: int) -> Command:
    done = project.finish(process)
    assert done.seconds < ENDS_WITHIN_S
    assert done.code == 128 + number
    assert "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert project.gone()
    return done


@pytest.mark.parametrize("send", [to_group, pytest.param(to_parent, marks=pytest.mark.exhaustive)])
def test_ctrl_c_in_training(project: Project, send: Callable[[subprocess.Popen[str], int], None]) -> None:
    process = project.start("recipe=mine", "trainer.fault=sleep", "loader.num_workers=1")
    project.wait_until_training()
    send(process, signal.SIGINT)
    done = ended_by(project, process, signal.SIGINT)
    assert done.err.startswith("Interrupted by SIGINT; no rank is left. Run directory: outputs/mine/")


@pytest.mark.exhaustive
def test_ctrl_c_twice(project: Project) -> None:  # H82
    process = project.start("recipe=mine", "trainer.fault=sleep")
    project.wait_until_training()
    to_group(process, signal.SIGINT)
    to_group(process, signal.SIGINT)
    ended_by(project, process, signal.SIGINT)


@pytest.mark.exhaustive
def test_a_lost_terminal_ends_it_likewise(project: Project) -> None:
    process = project.start("recipe=mine", "trainer.fault=sleep")
    project.wait_until_training()
    to_parent(process, signal.SIGHUP)
    ended_by(project, process, signal.SIGHUP)


@pytest.mark.exhaustive
def test_ctrl_c_while_the_parent_imports(project: Project) -> None:
    # the user's module says when: it is imported by the parent, after torch has begun to be
    (project.folder / "mine.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\nfor _ in range(600):\n    time.sleep(0.1)\n"
    )
    process = project.start("recipe=mine")
    project.wait_for((project.folder / "importing").exists, "the import")
    to_group(process, signal.SIGINT)
    assert "Interrupted" in ended_by(project, process, signal.SIGINT).err


@pytest.mark.exhaustive
def test_ctrl_c_while_the_ranks_import(project: Project) -> None:
    process = project.start("recipe=mine", "trainer.fault=sleep")
    project.wait_for(lambda: len(project.ranks()) == 2, "the start of the ranks")
    to_group(process, signal.SIGINT)
    ended_by(project, process, signal.SIGINT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("libraries", [25, 40, 50, 58])
def test_ctrl_c_at_other_moments_of_the_start(project: Project, libraries: int) -> None:
    # how many shared libraries it has mapped tells how far its imports are, whatever the speed of the machine
    process = project.start("recipe=mine", "trainer.fault=sleep")
    project.wait_for(lambda: _mapped_libraries(process.pid) >= libraries, "the start")
    to_group(process, signal.SIGINT)
    ended_by(project, process, signal.SIGINT)


def test_a_killed_launcher_leaves_no_rank_and_no_loader_process(project: Project) -> None:  # H30, H82
    process = project.start("recipe=mine", "trainer.fault=sleep", "loader.num_workers=1")
    project.wait_until_training()
    assert len(project.ranks()) >= 4
    to_parent(process, signal.SIGKILL)
    process.wait(timeout=ENDS_WITHIN_S)
    assert project.gone()


@pytest.mark.exhaustive
def test_a_launcher_killed_while_the_ranks_import_leaves_none(project: Project) -> None:
    process = project.start("recipe=mine", "trainer.fault=sleep")
    project.wait_for(lambda: len(project.ranks()) >= 1, "the start of a rank")
    to_parent(process, signal.SIGKILL)
    assert project.gone()


def _mapped_libraries(pid: int) -> int:
    if b"safetrain" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        return 0  # not yet the new program
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[-1] for line in maps if ".so" in line})
