"""From what the ranks say to the words of a verdict: pure functions, no process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safetrain import testimony
from safetrain.bypass import ways_past
from safetrain.flight_recorder import Collective
from safetrain.stacks import Frame
from safetrain.stalled import judge, judge_alone
from safetrain.testimony import State, Worker
from safetrain.verdict import Verdict

USER = Frame("/mine/train.py", 41, "training_step")
LOOP = Frame(str(Path(__file__).parents[2] / "safetrain" / "parts.py"), 50, "training_step")


def call(number: int = 7, op: str = "all_reduce", group: str = "0", *, done: bool = False, size: int = 5) -> Collective:
    about = {"0": "default_pg", "1": "safetrain_ddp"}[group]
    return Collective(group, about, (), number, op, ((size,),), "Float", done)


def rank(
    number: int,
    state: State,
    *collectives: Collective,
    phase: str = "training_step",
    stack: tuple[Frame, ...] = (LOOP, USER),
    process_state: str = "",
    workers: tuple[Worker, ...] = (),
    calls: tuple[str, ...] = (),
) -> testimony.Testimony:
    return testimony.Testimony(
        rank=number, host="node1", pid=100 + number, step=5, epoch=0, phase=phase, seconds=61.0, limit_s=60.0, count=9,
        state=state, process_state=process_state, stack=stack, collectives=collectives, calls=calls, workers=workers,
    )  # fmt: skip


def waiting_in_gradients(number: int) -> testimony.Testimony:
    return rank(number, "waiting", call(3, group="1", size=72), phase="vote", stack=(LOOP,))


def verdict_on(*ranks: testimony.Testimony) -> Verdict:
    found = judge(ranks)
    assert found is not None
    return found


def test_a_stuck_rank_is_named_with_its_line_and_the_others_are_grouped() -> None:
    found = verdict_on(*(waiting_in_gradients(n) for n in (3, 0, 2)), rank(1, "stuck"))
    assert found.sentence == (
        "Training stalled: rank 1 is stuck in training_step at step 5 (node1, process 101), without progress for 61 s."
    )
    assert (found.culprits, found.place) == ((1,), "/mine/train.py:41 in training_step")
    assert found.others == ("Ranks 0, 2 and 3 wait in all_reduce of 72 floats (the gradients) in the vote at step 5.",)
    assert "watchdog.stall_s (the limit was 60 s)" in found.remedy
    assert "limit_s=" in found.remedy


def test_the_text_has_the_culprit_first_and_says_where_the_rest_is(tmp_path: Path) -> None:
    found = verdict_on(waiting_in_gradients(0), rank(1, "stuck"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").touch()
    text = found.text(tmp_path)
    assert text.startswith(found.sentence)
    places = [
        text.index(part) for part in (found.place, found.others[0], "Likely cause", "What to do", "rank_1.log", ".json")
    ]
    assert places == sorted(places)
    inner = Frame("/mine/model.py", 7, "forward")
    deep = verdict_on(waiting_in_gradients(0), rank(1, "stuck", stack=(LOOP, USER, inner)))
    assert f"Stack of rank 1, innermost last:\n  {USER}\n  {inner}\n" in deep.text(None)
    assert str(LOOP) not in deep.text(None)
    written = json.loads(found.to_json(tmp_path))
    assert (written["text"], written["culprits"]) == (text, [1])
    assert [one["rank"] for one in written["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("process_state", "words", "remedy"),
    [
        ("T", "is stopped at step 5", "kill -CONT 101"),
        ("S", "is holding the interpreter at step 5", "gil_scoped_release"),
        ("D", "uninterruptible wait", "dmesg"),
        ("gone", "is gone at step 5", "log"),
        ("", "is not answering at step 5", "node1"),
    ],
)
def test_silence_is_evidence(process_state: str, words: str, remedy: str) -> None:
    silent = rank(1, "silent", phase="", stack=(), process_state=process_state)
    found = verdict_on(waiting_in_gradients(0), silent)
    assert found.culprits == (1,)
    assert words in found.sentence
    assert remedy in found.remedy


def test_a_loader_process_is_named() -> None:
    worker = Worker(4711, "S", (Frame("/mine/data.py", 12, "__getitem__"),))
    found = verdict_on(waiting_in_gradients(0), rank(1, "stuck", phase="data", stack=(LOOP,), workers=(worker,)))
    assert "stuck waiting for a loader process fetching data at step 5" in found.sentence
    assert found.place == "/mine/data.py:12 in __getitem__"
    assert "process 4711" in found.cause
    assert "spawn" in found.remedy


@pytest.mark.parametrize("other", ["moving", "paused"])
def test_a_job_in_which_a_rank_may_still_move_is_not_ended(other: State) -> None:
    assert judge([waiting_in_gradients(0), rank(1, other)]) is None


def test_nobody_is_late_while_somebody_debugs() -> None:
    assert judge([rank(0, "stuck"), rank(1, "paused"), waiting_in_gradients(2)]) is None


def test_the_minority_is_at_fault_where_all_wait() -> None:
    alone = rank(3, "waiting", call(), call(2, group="1", done=True))
    found = verdict_on(*(waiting_in_gradients(n) for n in range(3)), alone)
    assert found.culprits == (3,)
    assert "only rank 3 came to all_reduce of 5 floats (the default group)" in found.sentence
    assert "ranks 0-2 did not" in found.sentence
    assert found.place.startswith("/mine/train.py:41")
    assert len(found.others) == 1


def test_who_did_not_come_is_named() -> None:
    barrier = [rank(n, "waiting", call(op="barrier")) for n in (0, 1, 3)]
    found = verdict_on(*barrier, waiting_in_gradients(2))
    assert found.culprits == (2,)
    assert "rank 2 did not come to barrier (the default group)" in found.sentence
    assert "ranks 0, 1 and 3 have waited for 61 s" in found.sentence


def test_of_two_ranks_both_may_be_at_fault() -> None:
    found = verdict_on(rank(0, "waiting", call()), waiting_in_gradients(1))
    assert found.culprits == (0, 1)
    assert "rank 1 did not come" in found.sentence


def test_different_calls_at_the_same_point() -> None:
    found = verdict_on(rank(0, "waiting", call()), rank(1, "waiting", call(op="broadcast")))
    assert "different collectives" in found.sentence
    assert "all_reduce of 5 floats" in found.sentence
    assert "broadcast of 5 floats" in found.sentence


def test_all_in_one_call_is_the_network() -> None:
    found = verdict_on(*(rank(n, "waiting", call()) for n in range(2)))
    assert found.culprits == (0, 1)
    assert "network" in found.cause


def test_a_section_of_rank_0_is_told_by_its_name_and_its_own_limit() -> None:
    others = [rank(n, "moving", phase="rank_zero:export") for n in (1, 2)]
    found = verdict_on(rank(0, "stuck", phase="rank_zero:export"), *others)
    assert "rank 0 is stuck in rank_zero('export') at step 5" in found.sentence
    assert "raise limit_s of rank_zero('export') (the limit was 60 s)." in found.remedy
    assert found.others[0].startswith("Ranks 1 and 2 are in rank_zero('export') at step 5")


@pytest.mark.parametrize(("source", "lock"), [("with self.lock:", True), ("with open(path) as file:", False)])
def test_a_with_is_a_lock_only_where_nothing_was_called(tmp_path: Path, source: str, lock: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(source)
    frame = Frame(str(file), 1, "training_step")
    inner = () if lock else (Frame("/lib/python3.11/gzip.py", 300, "read"),)
    assert ("lock" in verdict_on(waiting_in_gradients(0), rank(1, "stuck", stack=(frame, *inner))).cause) == lock


def test_a_named_barrier() -> None:
    at_barrier = [rank(n, "waiting", phase="barrier:saved") for n in range(3)]
    found = verdict_on(*at_barrier, waiting_in_gradients(3))
    assert "rank 3 did not come to barrier('saved') at step 5" in found.sentence


def test_what_user_code_called_last_is_told_where_there_is_no_line() -> None:
    other = rank(0, "waiting", call(3, group="1"), phase="vote", stack=(LOOP,), calls=("barrier at /mine/a.py:7",))
    found = verdict_on(other, rank(1, "waiting", call()))
    assert "after barrier at /mine/a.py:7" in found.others[0]


def test_a_rank_that_left() -> None:
    found = verdict_on(waiting_in_gradients(0), rank(1, "left"))
    assert found.culprits == (1,)
    assert "rank 1 left fit() while rank 0 waits" in found.sentence


@pytest.mark.parametrize("state", ["stuck", "waiting"])
def test_a_rank_that_can_ask_nobody(state: State) -> None:
    found = judge_alone(rank(0, state, call()))
    assert "the other ranks cannot be asked" in found.sentence
    assert found.culprits == (0,)
    assert ("store" in found.cause) == (state == "waiting")


def test_a_testimony_comes_back_as_it_went() -> None:
    one = rank(1, "stuck", call(), workers=(Worker(1, "S", (USER,)),), calls=("barrier",))
    assert testimony.Testimony.from_json(one.to_json()) == one


CODE = """
def step(self, batch):
    for sample in batch:
        if sample is None:
            continue
        if rank == 0:
            return
    if self.done:
        barrier()
    else:
        def inner():
            return
"""


def test_ways_past_a_line(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(CODE)
    assert ways_past([Frame(str(file), 9, "step")]) == [
        f"the continue at {file}:5 (if sample is None)",
        f"the return at {file}:7 (if rank == 0)",
        f"the condition at {file}:8 (if self.done)",
    ]
    assert ways_past([Frame(str(tmp_path / "none.py"), 9, "step")]) == []
