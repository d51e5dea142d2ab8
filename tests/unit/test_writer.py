"""The writers of two ranks, as threads of one process: they meet on the store, or say who did not come."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore

from safetrain import tree, writer
from safetrain.shelf import Keep, Shelf
from safetrain.writer import Job, Outcome, Writer
from tests.states import own_state, shared_state


def job(step: int, rank: int) -> Job:
    structure, pieces = tree.split(shared_state(step))
    mine = {name: piece for name, piece in pieces.items() if piece.written_by(rank)}
    return Job(step, 0, None, "", structure, mine, own_state(step, rank))


def two_writers(folder: Path, store: HashStore, timeout_s: float = 30) -> list[Writer]:
    return [Writer(Shelf(folder, Keep(last=2)), store, rank, 2, timeout_s) for rank in range(2)]


def ended(one: Writer) -> Outcome:
    outcome = one.wait(60)
    assert outcome is not None
    return outcome


def test_all_hear_the_same_and_the_store_does_not_grow(tmp_path: Path) -> None:
    store = HashStore()
    writers = two_writers(tmp_path, store)
    keys = []
    for step in range(1, 5):
        for rank, one in enumerate(writers):
            one.start(job(step, rank))
        first, second = (ended(one) for one in writers)
        assert first == second == Outcome(step, path=str(tmp_path / f"step_{step}"))
        keys.append(store.num_keys())
    assert keys[1:] == [keys[0]] * 3


def test_an_outcome_is_given_once(tmp_path: Path) -> None:
    one = Writer(Shelf(tmp_path), HashStore(), 0, 1, 30)
    assert one.wait(0) is None
    one.start(job(1, 0))
    assert ended(one).path
    assert one.wait(0) is None
    assert not one.busy


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_GRACE_S", 0.3)
    first, second = two_writers(tmp_path, HashStore(), timeout_s=0.5)
    first.start(job(1, 0))
    assert ended(first).error == "rank 1 has not written its part in time (checkpoint.timeout_s=0.5)"
    assert not list(tmp_path.iterdir())
    second._number = 1
    second.start(job(2, 1))
    assert ended(second).error == "rank 0 has not begun in time (checkpoint.timeout_s=0.5)"


def test_where_rank_0_can_not_begin_all_hear_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writers = two_writers(tmp_path / "file", HashStore())
    for rank, one in enumerate(writers):
        one.start(job(1, rank))
    first, second = (ended(one) for one in writers)
    assert first == second
    assert first.error.startswith("rank 0 on ")
    assert "can't write a checkpoint: FileExistsError" in first.error or "NotADirectoryError" in first.error


def test_after_a_failure_the_next_one_goes_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = two_writers(tmp_path, HashStore())

    def refuse(*_: object) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "commit", refuse)
        for rank, one in enumerate(writers):
            one.start(job(1, rank))
        outcomes = [ended(one) for one in writers]
    assert all(outcome.error.endswith("can't write a checkpoint: MemoryError: no more") for outcome in outcomes)
    assert not list(tmp_path.iterdir())
    for rank, one in enumerate(writers):
        one.start(job(2, rank))
    assert {ended(one).path for one in writers} == {str(tmp_path / "step_2")}
