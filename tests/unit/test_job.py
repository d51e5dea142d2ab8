"""What the launcher makes of a job that ended: which failure is the same again, what is kept, what a signal means."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safetrain import job
from safetrain.failure import Failure
from safetrain.signals import Interrupted
from safetrain.verdict import Verdict, put_away


def config(run_dir: Path, resume: str = "none") -> Any:
    return SimpleNamespace(run_dir=str(run_dir), resume=resume)


def failed(run_dir: Path, process: int = 1, step: int = 7) -> None:
    sentence = f"Training failed on rank 1 at step {step} in training_step (vm, process {process})."
    assert Verdict(sentence, (1,), place="mine.py:16", detail="ValueError: bad").publish(run_dir)


def test_the_same_failure_is_told_by_step_place_and_error_not_by_its_process(tmp_path: Path) -> None:
    ways = []
    for number, (process, step) in enumerate([(1, 7), (2, 7), (3, 8)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        failed(folder, process, step)
        ways.append(job._way_of_failing(folder))
    assert ways[0] == ways[1] != ways[2]


def test_the_same_step_is_the_same_whatever_was_saved_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save under way may be cut off in one attempt, and not in the next. Without a step, a save is progress."""
    killed = Verdict("Training failed: rank 1 (process 3) was killed by SIGKILL.", (1,))
    ways: list[list[tuple[str, ...]]] = [[], []]
    for saved in ("step_4", "step_6"):
        monkeypatch.setattr(job, "newest_checkpoint", lambda _run_dir, saved=saved: saved)
        for found, verdict in zip(ways, (None, killed), strict=True):
            folder = tmp_path / f"{saved}_{verdict is None}"
            folder.mkdir()
            failed(folder) if verdict is None else verdict.publish(folder)
            found.append(job._way_of_failing(folder))
    assert ways[0][0] == ways[0][1]
    assert ways[1][0] != ways[1][1]


@pytest.mark.parametrize("text", [None, "", '{"sen'])
def test_a_disk_that_took_no_verdict_or_half_of_it_breaks_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "failure.json").write_text(text)
    assert job._way_of_failing(tmp_path) == ()


def test_what_each_attempt_said_is_kept_also_over_jobs(tmp_path: Path) -> None:
    for process in (1, 2, 3):
        failed(tmp_path, process)
        (tmp_path / "failures").mkdir()
        (tmp_path / "failures" / "rank_1.json").write_text("")
        put_away(tmp_path)
    assert [f"process {n}" in (tmp_path / f"failure_{n}.txt").read_text() for n in (1, 2, 3)] == [True] * 3
    assert all((tmp_path / f"failures_{n}" / "rank_1.json").exists() for n in (1, 2, 3))
    assert [f"process {n}" in (tmp_path / f"failure_{n}.html").read_text() for n in (1, 2, 3)] == [True] * 3
    assert not list(tmp_path.glob("failure.*"))


def test_ctrl_c_is_told_in_one_line(tmp_path: Path) -> None:
    text, code = job._interrupted(Interrupted(signal.SIGINT), config(tmp_path), 2)
    assert (text, code) == (f"Interrupted by SIGINT; no rank is left. Run directory: {tmp_path}", 130)


def test_what_is_saved_is_told_to_who_pressed_ctrl_c_and_of_a_killed_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = "The last checkpoint is step_20: go on with resume=auto."
    for module in ("job", "verdict"):
        monkeypatch.setattr(f"safetrain.{module}.last_checkpoint", lambda _: saved)
    text, _ = job._interrupted(Interrupted(signal.SIGINT), config(tmp_path), 2)
    assert text.endswith(f"\n{saved}")
    told = Verdict("Training failed: rank 1 (process 7) was killed by SIGKILL.", (1,)).publish(tmp_path)
    assert told is not None
    assert saved in told
    kept = "The state at step 41 is saved in checkpoints/step_41: go on with resume=auto."
    put_away(tmp_path)
    assert saved not in str(Verdict("Training failed on rank 1.", (1,), kept=kept).publish(tmp_path))


def test_sigterm_before_a_step_ends_says_from_where_the_job_would_go_on(tmp_path: Path) -> None:
    text, code = job._interrupted(Interrupted(signal.SIGTERM), config(tmp_path), 2)
    assert code == 75
    assert text.endswith("nothing was saved, it begins anew.")
    text, _ = job._interrupted(Interrupted(signal.SIGTERM), config(tmp_path, resume="old/checkpoints/step_40"), 2)
    assert text.endswith("nothing was saved, it begins at old/checkpoints/step_40.")


def test_a_rank_that_fails_in_the_grace_is_a_failure_and_not_to_be_run_again(tmp_path: Path) -> None:
    Failure.of(ValueError("bad label"), 1, victim=False).write(tmp_path)
    text, code = job._interrupted(Interrupted(signal.SIGTERM), config(tmp_path), 2)
    assert code == 1
    assert "ValueError: bad label" in text
    assert (tmp_path / "failure.txt").read_text() == text


def test_samples_that_were_at_hand_both_times_are_named_and_only_those(tmp_path: Path) -> None:
    at = "rank 1 was at samples 17, 93 of the dataset (batch 9 of epoch 2)"
    Verdict("Training failed on rank 1 at step 7.", (1,), batch=at).publish(tmp_path)
    assert job._batch_at_hand(tmp_path) == at
    assert job._poison(at, at).startswith(f"\nBoth times {at}. Look at these samples")
    assert job._poison("", "") == job._poison("rank 1 was at sample 5", at) == ""
    assert job._batch_at_hand(tmp_path / "nothing") == ""
