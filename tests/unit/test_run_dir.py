"""Where a job writes: in a directory of its own, or on in that of the run it resumes; never two in one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from safetrain.errors import UsageError
from safetrain.run_dir import (
    choose_run_dir,
    forget_restart,
    note_for_restart,
    occupied,
    passed_over,
    run_before_restart,
)


def saved_run(parent: Path, name: str, at_s: float) -> Path:
    """A run's directory whose last checkpoint came at that time."""
    checkpoints = parent / name / "checkpoints"
    (checkpoints / "step_3").mkdir(parents=True)
    os.utime(checkpoints, (at_s, at_s))
    return parent / name


def test_each_job_has_its_own(tmp_path: Path) -> None:
    chosen = [choose_run_dir(str(tmp_path / "mine")) for _ in range(3)]
    assert len(set(chosen)) == 3
    assert all(Path(each).is_dir() for each in chosen)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", Path(chosen[0]).name)


def test_auto_is_the_run_that_was_the_last_to_save(tmp_path: Path) -> None:
    saved_run(tmp_path, "a", 100)
    saved_run(tmp_path, "b", 300)
    saved_run(tmp_path, "c", 200)
    (tmp_path / "d" / "checkpoints").mkdir(parents=True)  # which never came to save
    assert choose_run_dir(str(tmp_path), "auto") == str(tmp_path / "b")
    with occupied(tmp_path / "b"):
        assert choose_run_dir(str(tmp_path), "auto") == str(tmp_path / "c")
    assert choose_run_dir(str(tmp_path), "auto") == str(tmp_path / "b")


def begun(run_dir: Path, at_s: float) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").touch()
    os.utime(run_dir / "config.yaml", (at_s, at_s))


def test_auto_says_which_newer_run_it_passes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported by a new user: the newest run had saved nothing, and an older one was taken without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    begun(tmp_path / "x" / "c", 300)
    chosen = choose_run_dir("x", "auto")
    assert passed_over(Path(chosen)) == "x/c has no checkpoint: it begins anew"
    begun(saved_run(tmp_path / "x", "a", 100), 90)
    assert passed_over(Path(choose_run_dir("x", "auto"))) == "x/c has no checkpoint: going on with x/a"
    begun(saved_run(tmp_path / "x", "b", 200), 400)
    assert passed_over(Path(choose_run_dir("x", "auto"))) == ""
    with occupied(tmp_path / "x/b"):
        assert passed_over(Path(choose_run_dir("x", "auto"))) == "x/b is another job's at this time: going on with x/a"
    assert passed_over(Path(choose_run_dir("x"))) == ""


def test_auto_begins_anew_where_nothing_was_saved(tmp_path: Path) -> None:
    chosen = Path(choose_run_dir(str(tmp_path / "mine"), "auto"))
    assert chosen.parent == tmp_path / "mine"
    assert chosen.is_dir()


def test_a_run_goes_on_in_its_own_and_a_checkpoint_starts_a_new_one(tmp_path: Path) -> None:
    run_dir = saved_run(tmp_path, "a", 100)
    assert choose_run_dir(str(tmp_path / "mine"), str(run_dir)) == str(run_dir)
    chosen = choose_run_dir(str(tmp_path / "mine"), str(run_dir / "checkpoints" / "step_3"))
    assert Path(chosen).parent == tmp_path / "mine"


def test_two_jobs_in_one(tmp_path: Path) -> None:
    refused = pytest.raises(UsageError, match=rf"another job \(process {os.getpid()} on .*is working in")
    with occupied(tmp_path), refused, occupied(tmp_path):
        pass
    with occupied(tmp_path):
        pass


def test_a_note_for_torchruns_restarts_is_gone_when_the_ranks_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    forget_restart()  # no torchrun, no note
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = tmp_path / "run"
    (run / "checkpoints" / "step_4").mkdir(parents=True)
    note_for_restart(str(run))
    assert run_before_restart() == str(run)
    forget_restart()
    assert run_before_restart() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
