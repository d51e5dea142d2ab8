"""Records of failures, who is the culprit, and the words of the summary."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from safetrain.errors import PeerFailed, PreflightError, RankFailed
from safetrain.failed import verdict_on
from safetrain.failure import Exit, Failure, await_records, is_user_file, read_failures
from safetrain.policies import Policies
from safetrain.work import Work


def record(rank: int, error: BaseException, *, time_ns: int = 0, victim: bool = False) -> Failure:
    facts = vars(Failure.of(error, rank, victim=victim)) | {"time_ns": time_ns, "host": "node1", "pid": 100 + rank}
    return Failure(**facts)


def summary(run_dir: Path, world_size: int, exits: Sequence[Exit] = ()) -> str:
    return verdict_on(run_dir, world_size, exits).text(run_dir)


def raised(path: Path, code: str) -> BaseException:
    """The exception of a user's file that holds ``code``."""
    path.write_text(textwrap.dedent(code))
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever it is
        exec(compile(path.read_text(), str(path), "exec"), {})
    own_frame = caught.value.__traceback__
    assert own_frame is not None
    return caught.value.with_traceback(own_frame.tb_next)


def test_a_record_names_the_users_line_step_and_phase(tmp_path: Path) -> None:
    cause = raised(
        tmp_path / "mine.py",
        """
        import json
        def training_step(text):
            return json.loads(text)
        training_step("{")
        """,
    )
    error = RankFailed("user code failed", step=12, phase="training_step")
    error.__cause__ = cause
    failure = Failure.of(error, 3, victim=False)
    assert (failure.rank, failure.step, failure.phase, failure.victim) == (3, 12, "training_step", False)
    assert failure.place == f"{tmp_path}/mine.py:4"
    assert failure.error == "JSONDecodeError"
    lines = failure.traceback.splitlines()
    assert lines[1].strip() == f'File "{tmp_path}/mine.py", line 5, in <module>'
    assert any("json/__init__.py" in line for line in lines)  # what the user's code called is kept


def test_a_loader_process_puts_the_place_into_its_message(tmp_path: Path) -> None:
    message = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{tmp_path}/data.py", line 7, in __getitem__\n    raise ValueError("bad: sample")\n'
        "ValueError: bad: sample\n"
    )
    record(1, ValueError(message)).write(tmp_path)
    text = summary(tmp_path, 2)
    assert f"  {tmp_path}/data.py:7\n    ValueError: bad: sample\n" in text


def test_records_are_read_back_and_a_victim_waits_for_the_culprits(tmp_path: Path) -> None:
    failures = [record(rank, ValueError(f"bad {rank}"), time_ns=rank) for rank in (1, 0)]
    for failure in failures:
        failure.write(tmp_path)
    await_records(tmp_path, [0, 1], limit_s=60.0)  # both are there
    await_records(tmp_path, [2], limit_s=0.05)  # never comes
    assert read_failures(tmp_path) == failures[::-1]


def test_the_earliest_that_is_no_victim_is_the_culprit(tmp_path: Path) -> None:
    victim = record(0, ConnectionError("closed by peer"), time_ns=1, victim=True)
    peer = record(3, PeerFailed("rank 2 failed", ranks=[2], step=4), time_ns=2)
    first, second = record(2, ValueError("a"), time_ns=3), record(1, ValueError("b"), time_ns=4)
    assert peer.victim
    for failure in (victim, peer):
        failure.write(tmp_path)
    assert verdict_on(tmp_path, 4).culprits == (2,)  # nobody's own record; the peer was told
    for failure in (second, first):
        failure.write(tmp_path)
    found = verdict_on(tmp_path, 4)
    assert (found.culprits, found.detail) == ((2,), "ValueError: a")
    assert found.others == (
        "Rank 1 failed too: ValueError: b",
        "Ranks 0 and 3 did not fail: ended because ranks 1 and 2 did.",
    )


def test_the_summary_tells_the_culprit_first_its_traceback_once_and_then_the_victims(tmp_path: Path) -> None:
    error = RankFailed("user code failed", step=12, phase="training_step")
    error.__cause__ = raised(tmp_path / "mine.py", "raise ValueError('bad label 12')")
    record(1, error, time_ns=5).write(tmp_path)
    record(0, PeerFailed("rank 1 failed", ranks=[1], step=12), time_ns=6).write(tmp_path)
    text = summary(tmp_path, 4)
    assert text == textwrap.dedent(
        f"""\
        Training failed on rank 1 at step 12 in training_step (node1, process 101).

          {tmp_path}/mine.py:1
            ValueError: bad label 12

        Ranks 0, 2 and 3 did not fail: ended because rank 1 did.

        Traceback of rank 1, from your code on:
        Traceback (most recent call last):
          File "{tmp_path}/mine.py", line 1, in <module>
            raise ValueError('bad label 12')
        ValueError: bad label 12

        All that is known of every rank: {tmp_path}/failure.html (for programs: failure.json)
        """
    )


def test_ranks_that_fail_alike_are_one_story_and_another_failure_is_a_line(tmp_path: Path) -> None:
    for rank in range(3):
        record(rank, ValueError("limit of skips reached"), time_ns=rank).write(tmp_path)
    record(3, OSError("disk full"), time_ns=9).write(tmp_path)
    text = summary(tmp_path, 4)
    assert text.startswith("Training failed on ranks 0-2 (node1, process 100).")
    assert "Rank 3 failed too: OSError: disk full" in text
    assert text.count("None of your code was running; the traceback is in the log.") == 1
    assert "did not fail" not in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "left with exit code 3 and without an exception: look for os._exit(3)"),
        (-signal.SIGKILL, "was killed by SIGKILL. As a rule the machine or the container ran out of memory"),
        (-signal.SIGABRT, "was ended by SIGABRT. C++ code gave up"),
        (0, "left with exit code 0 before the others were done: look for os._exit"),
    ],
)
def test_a_rank_that_said_nothing_is_told_by_how_it_ended(tmp_path: Path, code: int, words: str) -> None:
    record(0, ConnectionError("closed by peer"), victim=True).write(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text("".join(f"line {n}\n" for n in range(100)))
    text = summary(tmp_path, 2, [Exit(0, 100, 1), Exit(1, 101, code)])
    assert text.startswith(f"Training failed: rank 1 (process 101) {words}")
    assert "  line 99\n" in text
    assert "line 50" not in text
    assert "Rank 0 did not fail: ended because rank 1 did." in text
    assert "closed by peer" not in text


def test_what_the_preflight_refuses_is_nobodys_failure(tmp_path: Path) -> None:
    error = PreflightError("config: seed differs.\nTo train in spite of it: preflight.checks.config=warn")
    for rank in (0, 1):
        record(rank, error).write(tmp_path)
    text, _, rest = summary(tmp_path, 3).partition("\n\nAll that is known")
    assert text == (
        "Refused before the first step.\n\n"
        "    config: seed differs.\n"
        "    To train in spite of it: preflight.checks.config=warn"
    )
    assert rest


def test_where_nobody_says_why_the_first_to_suffer_is_told(tmp_path: Path) -> None:
    record(1, ConnectionError("timed out"), time_ns=1, victim=True).write(tmp_path)
    record(0, ConnectionError("closed by peer"), time_ns=2, victim=True).write(tmp_path)
    assert "ConnectionError: timed out" in summary(tmp_path, 2, [Exit(0, 100, 1), Exit(1, 101, 1)])
    assert summary(tmp_path / "empty", 2).startswith("Training failed; no rank says why.")


def test_where_a_policy_s_limit_was_passed_it_is_told_what_to_change_not_only_to_go_on(tmp_path: Path) -> None:
    for rank in (0, 1):
        stopped = Policies().stopped(11, "non-finite gradient", "", 11, "")
        record(rank, stopped).write(tmp_path)
    text = summary(tmp_path, 2)
    assert text.startswith("Training failed on ranks 0 and 1 at step 11 ")
    assert "\nWhat to do: set loop.clip_norm " in text
    assert "go on with resume=auto" not in text


def test_whose_file_it_is() -> None:
    import hydra
    import torch

    import safetrain.recipes.resnet_ddp as recipe
    from safetrain import failure

    assert is_user_file(__file__)
    assert is_user_file(str(recipe.__file__))
    for module in (torch, hydra, failure, textwrap):
        assert not is_user_file(str(module.__file__)), module
    assert not is_user_file("<frozen runpy>")


def test_a_loader_process_is_told_with_the_signal_that_ended_it() -> None:
    first = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error.")
    second = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    second.__cause__ = first
    failed = RankFailed("rank 0 failed", step=4, phase="the data set")
    failed.__cause__ = second
    assert Failure.of(failed, 0, victim=False).message == str(first)


def test_the_samples_at_hand_and_what_became_of_the_state_are_told(tmp_path: Path) -> None:
    failed = RankFailed("rank 1 failed", step=41, phase="training_step", work=Work(1, 8, [17, 93]))
    peer = PeerFailed("rank 1 failed at step 41: ...", ranks=[1], step=41)
    for error in (failed, peer):
        error.kept = "The state at step 41 is saved in checkpoints/step_41: go on with resume=auto."
    record(1, failed).write(tmp_path)
    record(0, peer).write(tmp_path)
    text = summary(tmp_path, 2)
    assert "\n\nRank 1 was at samples 17, 93 of the dataset (batch 9 of epoch 2).\n\n" in text
    assert "\n\nThe state at step 41 is saved in checkpoints/step_41: go on with resume=auto.\n\n" in text
    assert [(one.rank, one.samples) for one in read_failures(tmp_path)] == [(0, []), (1, [17, 93])]
