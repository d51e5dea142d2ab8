"""Redirected output: everything in the rank's file; on the terminal rank 0's output and the other ranks' warnings."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.observer import Event, RunInfo
from safetrain.progress import ProgressBar
from safetrain.rank_log import LOG_ONLY, RankLog, Repeats, redirect_output


def in_a_rank(work: Callable[[], None], run_dir: Path, rank: int) -> tuple[str, str]:
    """Run ``work`` redirected in a forked process that leaves by ``os._exit``: its log, and what its terminal got."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(sender, 1)
        os.dup2(sender, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (pytest's own streams are captured)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        logging.getLogger().handlers.clear()
        log: RankLog | None = None
        try:
            log = redirect_output(run_dir, rank)
            work()
        except ValueError:
            traceback.print_exc()
        finally:
            if log is not None:
                log.flush()
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        shown = pipe.read()
    os.waitpid(pid, 0)
    return (run_dir / f"logs/rank_{rank}.log").read_text(), shown


def say_everything() -> None:
    print("from print")
    print("from stderr", file=sys.stderr)
    logging.getLogger("user").info("from logging")
    logging.getLogger("user").warning("from a warning")
    libc = ctypes.CDLL(None)
    libc.write(1, b"from C to 1\n", 12)
    libc.write(2, b"from C to 2\n", 12)
    subprocess.run(["echo", "from a child"], check=True)
    raise ValueError("from an exception")


EVERYTHING = [
    "from print", "from stderr", "INFO user: from logging", "WARNING user: from a warning", "from C to 1",
    "from C to 2", "from a child", "ValueError: from an exception",
]  # fmt: skip


def test_rank_0_is_in_its_file_and_on_the_terminal(tmp_path: Path) -> None:
    log, shown = in_a_rank(say_everything, tmp_path, 0)
    assert [text for text in EVERYTHING if text not in log] == []
    assert shown == log


def test_what_nobody_needs_to_see_come_is_in_the_file_only(tmp_path: Path) -> None:
    def say() -> None:
        print("before")
        logging.getLogger(LOG_ONLY).info("checkpoint of step 4 written")
        logging.getLogger(LOG_ONLY).warning("no: a warning is seen")
        print("after")

    log, shown = in_a_rank(say, tmp_path, 0)
    assert "INFO safetrain.log_only: checkpoint of step 4 written\n" in log
    assert [line for line in log.splitlines(True) if "step 4" not in line] == shown.splitlines(True)


def test_another_rank_is_in_its_file_and_only_its_warnings_on_the_terminal(tmp_path: Path) -> None:
    log, shown = in_a_rank(say_everything, tmp_path, 1)
    assert [text for text in EVERYTHING if text not in log] == []
    assert shown == "[rank 1] WARNING user: from a warning\n"


def test_the_file_keeps_the_order(tmp_path: Path) -> None:
    log, _ = in_a_rank(say_everything, tmp_path, 1)
    positions = [log.index(text) for text in EVERYTHING]
    assert positions == sorted(positions)


def test_a_forked_child_is_heard_once(tmp_path: Path) -> None:
    def work() -> None:
        pid = os.fork()
        if pid == 0:
            print("from a fork")
            return  # and on to flush, as at the end of a process
        os.waitpid(pid, 0)

    log, shown = in_a_rank(work, tmp_path, 0)
    assert log == "from a fork\n"
    assert shown == log


def test_a_restarted_rank_continues_its_file(tmp_path: Path) -> None:
    in_a_rank(lambda: print("first life"), tmp_path, 0)
    log, shown = in_a_rank(lambda: print("second life"), tmp_path, 0)
    assert log == "first life\nsecond life\n"
    assert shown == "second life\n"


def test_what_was_written_before_a_kill_is_in_the_file(tmp_path: Path) -> None:
    def die() -> None:
        print("last words")
        os.kill(os.getpid(), 9)

    assert in_a_rank(die, tmp_path, 0)[0] == "last words\n"


def test_a_terminal_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    receiver, sender = os.pipe()
    os.close(receiver)

    def work() -> None:
        print("on")
        print("and on")

    pid = os.fork()
    if pid == 0:
        os.dup2(sender, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        log = redirect_output(tmp_path, 0)
        work()
        log.flush()
        os._exit(7)
    os.close(sender)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (tmp_path / "logs/rank_0.log").read_text() == "on\nand on\n"


def test_progress_is_told_in_the_log_as_well(tmp_path: Path) -> None:
    def work() -> None:
        bar = ProgressBar()
        bar.start(RunInfo(0, 1, None, "demo", 1, 2, None, 0, "", "cpu", 10))
        bar.step(2, 0)
        bar.event(Event("warning", 2, 0, text="careful"))
        bar.event(Event("end", 2, 0))

    log, shown = in_a_rank(work, tmp_path, 0)
    assert log.splitlines()[:2] == ["demo: 10 parameters, 1 process on cpu", "step 2: warning: careful"]
    assert shown == log


@pytest.mark.parametrize(("times", "shown"), [(1, 1), (9, 1), (10, 2), (99, 2), (100, 3), (1000, 4)])
def test_a_repeated_text_is_shown_at_powers_of_ten(times: int, shown: int) -> None:
    repeats = Repeats()
    passed = [text for text in (repeats.pass_on("again") for _ in range(times)) if text is not None]
    assert len(passed) == shown


def test_different_texts_are_forgotten_in_time() -> None:
    repeats = Repeats()
    for number in range(5000):
        assert repeats.pass_on(f"text {number}") == f"text {number}"
    assert len(repeats._counts) < 2000
