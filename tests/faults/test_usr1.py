"""``kill -USR1`` of the launcher shows where every rank is, stops nothing, and sees a rank that answers nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gauntlet import write_project

pytestmark = pytest.mark.slow

LIMIT_S = 90.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)


def test_the_launcher_shows_where_every_rank_is(tmp_path: Path) -> None:
    write_project(tmp_path)
    source = tmp_path / "mine.py"
    wait = (
        "        if self.step == 3 and self.comm.rank == 1:\n"
        "            import pathlib, time\n"
        "            pathlib.Path('there').touch()\n"
        "            while not pathlib.Path('go_on').exists():\n"
        "                time.sleep(0.01)\n"
    )
    head = "    def training_step(self, batch):\n"
    source.write_text(source.read_text().replace(head, head + wait))
    with (tmp_path / "said").open("w") as said:
        job = subprocess.Popen(
            [sys.executable, "-m", "safetrain", "recipe=mine", "launch.nproc_per_node=2", "watchdog.poll_s=0.1"],
            cwd=tmp_path, stderr=said, stdout=said, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        wait_for((tmp_path / "there").exists, "step 3")
        time.sleep(1)  # the watchdogs' next look; rank 0 comes to its wait
        job.send_signal(signal.SIGUSR1)
        wait_for(lambda: "rank 1 (process" in (tmp_path / "said").read_text(), "the answer")
        (tmp_path / "go_on").touch()
        assert job.wait(timeout=LIMIT_S) == 0
    finally:
        job.kill()
        job.wait()
    text = (tmp_path / "said").read_text()
    ranks = text[text.index("rank 0 (process") :]
    assert "at step 3, for " in ranks.partition("rank 1 (process")[0]
    assert "in training_step at step 3, for " in ranks.partition("rank 1 (process")[2]
    assert f"{source}:2" in ranks  # line 20 or 21
    assert "in training_step" in ranks
