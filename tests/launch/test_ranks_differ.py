"""The ranks do not do the same: the job ends, and the summary shows both sides."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.project import LIMIT_S, Project

pytestmark = pytest.mark.slow

_CODE = """
import torch
import torch.distributed as dist
import mine
import safetrain

class Differs(mine.Mine):
    def other_op(self):
        self.odd = True
    def training_step(self, batch):
        loss = super().training_step(batch)
        if self.fault == "other_op":
            op = dist.ReduceOp.MAX if hasattr(self, "odd") else dist.ReduceOp.SUM
            dist.all_reduce(torch.ones(4), op=op)  # paired
        return loss
    def drift(self):
        with torch.no_grad():
            self.model.bias.add_(1)
    def on_epoch_start(self):
        if self.fault == "section":
            with self.rank_zero("export") as mine:
                if mine:
                    raise OSError("No space left on device")  # the disk
    def section(self):
        pass
    def stop_here(self):
        pass

class Stops(mine.Mine):
    def training_step(self, batch):
        if self.step == 1:
            answer = 6
            safetrain.breakpoint(rank=self.culprit)
            print("went on with", answer)
        return super().training_step(batch)
"""


@pytest.fixture(autouse=True)
def _code(project: Project) -> None:
    (project.folder / "differs.py").write_text(_CODE)


def line(project: Project, comment: str) -> str:
    lines = (project.folder / "differs.py").read_text().splitlines()
    (number,) = (n for n, text in enumerate(lines, 1) if text.endswith(comment))
    return f"{project.folder}/differs.py:{number}"


def summary(project: Project, fault: str, ranks: int, on: int, *more: str) -> str:
    done = project.run(
        "recipe=mine", "trainer._target_=differs.Differs", f"trainer.fault={fault}", f"trainer.culprit={on}",
        f"launch.nproc_per_node={ranks}", *more,
    )  # fmt: skip
    assert done.code == 1
    assert project.gone()
    return done.err


@pytest.mark.parametrize(("ranks", "on"), [(2, 0), (4, 3)])
def test_collectives_that_do_not_belong_together(project: Project, ranks: int, on: int) -> None:
    text = summary(project, "other_op", ranks, on)
    assert text.startswith("Training ended at step 1: the ranks issued different collectives, and they were paired")
    assert f"  rank {on}: all_reduce(MAX) of float32[4] at {line(project, '# paired')}\n" in text
    assert f": all_reduce(SUM) of float32[4] at {line(project, '# paired')}\n" in text
    assert "did not fail" not in text
    assert "Traceback" not in text


@pytest.mark.exhaustive
def test_replicas_that_drift_apart(project: Project) -> None:
    text = summary(project, "drift", 2, 1, "audit.every_steps=2")
    assert text.startswith("Training ended at step 2: the ranks' replicas are not the same any more")
    assert "between steps 0 and 2" in text
    assert "parameter bias: by up to 1 (rank 0 against rank 1)" in text
    (run_dir,) = project.run_dirs()
    assert json.loads((run_dir / "failure.json").read_text())["culprits"] == []  # of two, nobody knows which


@pytest.mark.exhaustive
def test_a_section_that_fails(project: Project) -> None:
    text = summary(project, "section", 2, 0)
    assert re.match(r"Training failed on rank 0 at step 0 in rank_zero\('export'\)", text)
    assert f"  {line(project, '# the disk')}\n    OSError: No space left on device\n" in text
    assert "Rank 1 did not fail: ended because rank 0 did." in text


@pytest.mark.parametrize("on", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_breakpoint_stops_one_rank_on_the_terminal_and_pauses_all_watchdogs(project: Project, on: int) -> None:
    """Longer at the prompt than the stall limit allows anything else; the variables are there; training goes on."""
    here, there = pty.openpty()
    job = subprocess.Popen(
        [
            sys.executable, "-m", "safetrain", "recipe=mine", "trainer._target_=differs.Stops", f"trainer.culprit={on}",
            "watchdog.stall_s=1", "watchdog.first_step_stall_s=20",
        ],
        cwd=project.folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=there, stdout=there, stderr=there,
        start_new_session=True,
    )  # fmt: skip
    os.close(there)
    try:
        _read_until(here, b"(Pdb)")
        time.sleep(4)
        os.write(here, b"p answer * 7\n")
        assert b"42" in _read_until(here, b"42")
        os.write(here, b"c\n")
        _read_until(here, None)
        assert job.wait(LIMIT_S) == 0
    finally:
        job.kill()
        job.wait()
        os.close(here)
    (run_dir,) = project.run_dirs()
    assert "went on with 6" in Path(run_dir, "logs", f"rank_{on}.log").read_text()


@pytest.mark.exhaustive
def test_without_a_terminal_a_breakpoint_warns_and_training_goes_on(project: Project) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "safetrain", "recipe=mine", "trainer._target_=differs.Stops", "trainer.culprit=1"],
        cwd=project.folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert "[rank 1] WARNING safetrain: rank 1: no debugger at " in done.stderr
    assert "py-spy dump --pid" in done.stderr


def _read_until(terminal: int, text: bytes | None) -> bytes:
    """What the job prints until ``text`` comes; to its end with None."""
    seen, deadline = b"", time.monotonic() + LIMIT_S
    while text is None or text not in seen:
        assert time.monotonic() < deadline, seen
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the last process has closed its end
            piece = b""
        if not piece:
            assert text is None, seen
            return seen
        seen += piece
    return seen
