"""What the person who watches sees, in a pipe and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.observer import Event, RunInfo
from safetrain.progress import ProgressBar
from safetrain.rank_log import fresh_line, redirect_output


def run_info(run_dir: Path | None = None, epochs: int = 2, rank: int = 0, steps_per_epoch: int | None = 4) -> RunInfo:
    return RunInfo(
        rank=rank, world_size=2, run_dir=run_dir, name="demo", epochs=epochs, steps_per_epoch=steps_per_epoch,
        max_steps=None, start_step=0, config_text="", device="cpu", parameters=1234,
    )  # fmt: skip


def train(bar: ProgressBar, run: RunInfo, *, validate: bool = True) -> None:
    bar.start(run)
    step = 0
    for epoch in range(run.epochs):
        for _ in range(4):
            step += 1
            bar.step(step, epoch)
            bar.event(
                Event("train", step, epoch, {"train/loss": 1 / step, "train/samples_per_s": 1500.0, "train/lr": 0.1})
            )
        if validate:
            bar.event(Event("validation", step, epoch, {"val/accuracy": [0.5, 0.9, 0.8][epoch]}))
    bar.event(Event("end", step, run.epochs - 1))
    bar.close()


def test_in_a_pipe_there_is_a_plain_line_an_epoch(capfd: pytest.CaptureFixture[str]) -> None:
    train(ProgressBar(), run_info())
    shown = capfd.readouterr().err
    assert "\r" not in shown
    first, *epochs, finished, accuracy = shown.splitlines()
    assert first == "demo: 1,234 parameters, 2 processes on cpu"
    assert [re.sub(r"\d\d:\d\d", "T", line) for line in epochs] == [
        "epoch 1/2  step 4/8  loss 0.25  1,500 samples/s  val/accuracy 0.5  T left",
        "epoch 2/2  step 8/8  loss 0.125  1,500 samples/s  val/accuracy 0.9",
    ]
    assert finished == "finished      after 8 steps"
    assert accuracy == "val/accuracy  0.9  (lowest 0.5 in epoch 1, highest 0.9 in epoch 2)"


def test_in_a_pipe_epochs_without_validation_are_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    train(ProgressBar(), run_info(epochs=3), validate=False)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in lines[1:4]] == [
        ["epoch 1/3", "step 4/12"], ["epoch 2/3", "step 8/12"], ["epoch 3/3", "step 12/12"],
    ]  # fmt: skip


def test_in_a_pipe_long_epochs_are_told_from_time_to_time(capfd: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(line_every_s=0.0)
    bar.start(run_info(steps_per_epoch=None))
    bar.step(1, 0)
    bar.step(2, 0)
    assert capfd.readouterr().err.splitlines()[1:] == ["epoch 1/2  step 1/?", "epoch 1/2  step 2/?"]


def test_warnings_and_skips_are_told_once_and_then_counted(capfd: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.start(run_info())
    for step in range(1, 13):
        bar.event(Event("warning", step, 0, text="no gradient for head.bias on rank 1"))
    bar.event(Event("skip", 13, 0, text="rank 0 asked for it"))
    assert capfd.readouterr().err.splitlines()[1:] == [
        "step 1: warning: no gradient for head.bias on rank 1",
        "step 10: warning: no gradient for head.bias on rank 1 (10 times so far)",
        "step 13: skipped on every rank: rank 0 asked for it",
    ]


def test_the_summary_names_only_what_is_there(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "outputs/demo"
    (run_dir / "tensorboard").mkdir(parents=True)
    train(ProgressBar(), run_info(run_dir))
    shown = capfd.readouterr().err.splitlines()
    assert shown[-2:] == [
        "run directory  outputs/demo",
        "curves         tensorboard --logdir outputs/demo",
    ]
    assert not any("events" in line for line in shown)


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    train(ProgressBar(), run_info(rank=1))
    assert capfd.readouterr() == ("", "")


def on_a_terminal(work: Callable[[], None], columns: int = 100) -> str:
    """What a forked process that runs ``work`` sends to the terminal it has."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (pytest's own streams are captured)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    sent = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        sent += part
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, sent.decode()
    return sent.decode()


def on_the_screen(sent: str) -> list[str]:
    """The lines that stay on the screen; enough of a terminal for carriage returns and erased lines."""
    lines = []
    for line in sent.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            text = part.removeprefix("\x1b[K")
            if text != part:
                cells.clear()
            cells[: len(text)] = text
        lines.append("".join(cells).rstrip())
    return lines


def test_on_a_terminal_a_bar_shows_loss_speed_epoch_and_time_left() -> None:
    def work() -> None:
        bar = ProgressBar()
        bar.start(run_info())
        bar.step(1, 0)
        bar.event(Event("train", 1, 0, {"train/loss": 0.25, "train/samples_per_s": 1500.0, "train/skipped_steps": 2.0}))
        time.sleep(0.15)  # tqdm draws at most every 0.1 s
        bar.step(2, 0)

    *_, drawn = [part.strip() for part in on_a_terminal(work).split("\r") if part.strip()]
    assert re.fullmatch(r"epoch 1/2 +25%\|.+\| 2/8, loss 0\.25, 1,500 samples/s, 2 skipped, \d\d:\d\d left", drawn)


def test_on_a_terminal_lines_stand_above_the_bar_and_the_bar_goes_at_the_end() -> None:
    def work() -> None:
        bar = ProgressBar()
        bar.start(run_info())
        bar.step(1, 0)
        bar.event(Event("warning", 1, 0, text="careful"))
        train_rest(bar)

    def train_rest(bar: ProgressBar) -> None:
        for step in range(2, 9):
            bar.step(step, (step - 1) // 4)
        bar.event(Event("validation", 8, 1, {"val/loss": 0.5}))
        bar.event(Event("end", 8, 1))
        bar.close()

    screen = on_the_screen(on_a_terminal(work))
    assert [re.sub(r"\d\d:\d\d", "T", line) for line in screen] == [
        "demo: 1,234 parameters, 2 processes on cpu",
        "step 1: warning: careful",
        "epoch 1/2  step 4/8  T left",
        "epoch 2/2  step 8/8  val/loss 0.5",
        "finished  after 8 steps",
        "val/loss  0.5",
        "",
    ]


def test_on_a_terminal_redirected_prints_and_child_processes_stand_above_the_bar_too(tmp_path: Path) -> None:
    def work() -> None:
        log = redirect_output(tmp_path, 0)
        bar = ProgressBar()
        bar.start(run_info())
        bar.step(1, 0)
        print("from print")
        os.system("echo from a child")
        log.flush()
        bar.step(2, 0)
        bar.close()

    assert on_the_screen(on_a_terminal(work)) == [
        "demo: 1,234 parameters, 2 processes on cpu",
        "from print",
        "from a child",
        "",
    ]
    assert "\r" not in (tmp_path / "logs/rank_0.log").read_text()


def test_what_another_process_says_takes_the_place_of_the_bar() -> None:
    def work() -> None:
        bar = ProgressBar()
        bar.start(run_info())
        sys.stderr.write(f"{fresh_line(sys.stderr)}Training failed on rank 1\n")
        os._exit(0)  # a rank that is ended has no time to take its bar away

    assert on_the_screen(on_a_terminal(work)) == [
        "demo: 1,234 parameters, 2 processes on cpu",
        "Training failed on rank 1",
        "",
    ]


def test_a_terminal_of_unknown_width_has_a_bar_too() -> None:
    def work() -> None:
        bar = ProgressBar()
        bar.start(run_info())

    assert "epoch 1/2   0%|" in on_a_terminal(work, columns=0)


def test_a_run_without_a_known_end_has_a_bar_too() -> None:
    def work() -> None:
        bar = ProgressBar()
        bar.start(run_info(steps_per_epoch=None))
        time.sleep(0.15)
        bar.step(1, 0)

    assert "epoch 1/2 step 1, 00:00 so far" in on_a_terminal(work)
