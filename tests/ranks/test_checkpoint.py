"""Checkpoints of several ranks: what comes back, who waits for whom, and that no rank goes its own way."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from safetrain import archive, checkpoint, writer
from safetrain.checkpoint import Checkpoints
from safetrain.comm import Comm
from safetrain.config import Checkpoint
from safetrain.errors import CheckpointError, UsageError
from safetrain.shelf import Shelf
from safetrain.snapshot import Snapshot
from safetrain.testing import RankError, run_ranks
from tests.ranks.outcome import warnings_of_safetrain
from tests.states import assert_equal, own_state, shared_state, snapshot


def loaded(checkpoints: Checkpoints, where: str | Path = "auto") -> checkpoint.Saved:
    saved = checkpoints.load(where)
    assert saved is not None
    return saved


def test_what_is_saved_comes_back(world_size: int, tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        assert checkpoints.load("auto") is None
        for step in (5, 10):
            checkpoints.save(snapshot(step, comm.rank))
        checkpoints.finish()
        saved = loaded(checkpoints)
        assert (saved.step, saved.epoch, saved.world_size) == (10, 1, world_size)
        assert saved.config_text == "name: step 10\n"
        assert saved.path == tmp_path / "step_10"
        assert_equal(saved.shared, shared_state(10))
        assert_equal(saved.own, tuple(own_state(10, rank) for rank in range(world_size)))
        assert_equal(loaded(checkpoints, tmp_path / "step_5").shared, shared_state(5))

    run_ranks(work, world_size)


def test_another_number_of_ranks_gets_all_there_is(tmp_path: Path) -> None:
    def save(comm: Comm) -> None:
        Checkpoints(tmp_path, comm, Checkpoint()).save(snapshot(3, comm.rank), wait=True)

    def load(comm: Comm) -> None:
        saved = loaded(Checkpoints(tmp_path, comm, Checkpoint()))
        assert saved.world_size == 4
        assert_equal(saved.own, tuple(own_state(3, rank) for rank in range(4)))

    run_ranks(save, 4)
    run_ranks(load, 2)
    run_ranks(load, 1)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_state_may_change_when_save_returns(tmp_path: Path, asynchronous: bool) -> None:
    """Everything that can change in place does, at once; twice, since the memory for the copy is used again."""

    def work(comm: Comm) -> None:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint(asynchronous=asynchronous))
        for step in (1, 2):
            given = snapshot(step, comm.rank)
            checkpoints.save(given)
            for tensor in given.shared["model"].values():
                tensor.zero_()
            given.shared["optimizers"].clear()
            given.own["torch"].zero_()
            given.own["arrays"][0][:] = 0
        checkpoints.finish()
        for step in (1, 2):
            saved = loaded(checkpoints, tmp_path / f"step_{step}")
            assert_equal(saved.shared, shared_state(step))
            assert_equal(saved.own, tuple(own_state(step, rank) for rank in range(2)))

    run_ranks(work, 2)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_h86_the_loop_goes_on_while_a_rank_writes(
    tmp_path: Path, slow_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing takes 3 s and a collective may take 1: training meets in collectives meanwhile, and nobody waits."""
    write_own, released = archive.write_own, threading.Event()

    def slow(folder: Path, rank: int, own: Any) -> Path:
        if rank == slow_rank:
            released.wait(20)
        return write_own(folder, rank, own)

    monkeypatch.setattr(archive, "write_own", slow)

    def work(comm: Comm) -> int:
        comm.leave()
        comm = Comm.join("cpu", timeout_s=1)
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        checkpoints.save(snapshot(1, comm.rank))
        begin, steps = time.monotonic(), 0
        while comm.agree(time.monotonic() - begin < 3, "all"):
            steps += 1
        assert Shelf(tmp_path).newest_good() is None
        comm.agree(True, "all")
        released.set()
        checkpoints.finish()
        assert loaded(checkpoints).step == 1
        return steps

    steps = run_ranks(work, 2)
    assert steps[0] == steps[1] > 100


def test_h86_the_next_save_waits_for_the_one_before_outside_of_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_PATIENCE_S", 0.2)
    write_shared = archive.write_shared

    def slow(*arguments: Any) -> Any:
        threading.Event().wait(2.5)
        return write_shared(*arguments)

    monkeypatch.setattr(archive, "write_shared", slow)

    def work(comm: Comm) -> list[str]:
        comm.leave()
        comm = Comm.join("cpu", timeout_s=1)
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        with warnings_of_safetrain() as lines:
            checkpoints.save(snapshot(1, comm.rank))
            checkpoints.save(snapshot(2, comm.rank))
        comm.agree(1, "sum")
        checkpoints.finish()
        assert loaded(checkpoints).step == 2
        return lines

    expected = "waiting until the checkpoint of step 1 is written, by rank 0"
    assert run_ranks(work, 2) == [[expected], [expected]]


def test_h11_the_folder_is_rank_0s_whatever_the_others_were_given(tmp_path: Path) -> None:
    def work(comm: Comm) -> Path:
        folder = tmp_path if comm.rank == 0 else Path("None")
        checkpoints = Checkpoints(folder, comm, Checkpoint())
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        return loaded(checkpoints).path

    assert run_ranks(work, 2) == [tmp_path / "step_1"] * 2
    assert not Path("None").exists()


def test_h85_the_others_wait_until_rank_0_has_made_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Shelf.begin

    def slow(shelf: Shelf, step: int) -> Path:
        threading.Event().wait(1)
        return begin(shelf, step)

    monkeypatch.setattr(Shelf, "begin", slow)

    def work(comm: Comm) -> int:
        checkpoints = Checkpoints(tmp_path / "made" / "later", comm, Checkpoint())
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        return loaded(checkpoints).step

    assert run_ranks(work, 2) == [1, 1]


def test_h87_nothing_is_read_to_the_device_that_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU shows it: every read of a file asks for the CPU, or fills tensors that are there."""
    asked: list[Any] = []
    load = torch.load

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.append((options["map_location"], options["weights_only"]))
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", watched)

    def work(comm: Comm) -> None:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        loaded(checkpoints)
        assert asked
        assert {(str(device), safe) for device, safe in asked} == {("cpu", True)}

    run_ranks(work, 1)


def test_a_state_that_could_not_be_read_back_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def work(comm: Comm) -> str:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        with pytest.raises(UsageError) as refused:
            checkpoints.save(Snapshot(1, 0, {"policies": {"skip": threading.Event()}}, {}, ""))
        checkpoints.save(snapshot(2, comm.rank), wait=True)
        assert loaded(checkpoints).step == 2
        return str(refused.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert "can't hold policies.skip: it is a threading.Event" in first


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two machines without a folder in common."""

    def work(comm: Comm) -> list[str]:
        checkpoints = Checkpoints(tmp_path / "only_here", comm, Checkpoint())
        if comm.rank == 1:
            checkpoints._shelf.folder = tmp_path / "only_there"
        with warnings_of_safetrain() as lines:
            checkpoints.save(snapshot(1, comm.rank), wait=True)
        assert not list((tmp_path / "only_here").iterdir())
        return lines

    (said,), others = run_ranks(work, 2)
    assert others == []
    assert "rank 1 on " in said
    assert f"It does not see {tmp_path}/only_there: checkpoints need a folder that all machines share" in said


def test_a_rank_that_can_not_read_stops_all(tmp_path: Path) -> None:
    def work(comm: Comm) -> str:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        if comm.rank == 1:
            archive._UNREADABLE = (ZeroDivisionError,)
            archive._load = lambda _path: 1 // 0  # type: ignore[assignment]
        with pytest.raises(CheckpointError) as refused:
            checkpoints.load("auto")
        return str(refused.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert first.startswith(f"rank 1: {tmp_path / 'step_1'} can't be read: ZeroDivisionError")


@pytest.mark.parametrize("where", ["auto", "a path"])
def test_all_ranks_hear_that_there_is_no_good_one(tmp_path: Path, where: str) -> None:
    def work(comm: Comm) -> str:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        checkpoints.save(snapshot(1, comm.rank), wait=True)
        comm.barrier("saved")
        if comm.rank == 0:
            (tmp_path / "step_1" / "rank_1.pt").unlink()
        with pytest.raises(CheckpointError) as refused:
            checkpoints.load("auto" if where == "auto" else tmp_path / "step_1")
        return str(refused.value)

    first, second = run_ranks(work, 2)
    assert first == second
    assert "rank_1.pt is missing" in first


def test_best_is_kept_by_the_metric(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint(keep_last=1, keep_best=1, mode="min"))
        for step, metric in enumerate([0.5, float("nan"), 0.1, float("-inf"), None, 0.3], 1):
            checkpoints.save(snapshot(step, comm.rank), metric=metric)
        checkpoints.finish()
        assert loaded(checkpoints, tmp_path / "best").step == 3
        assert loaded(checkpoints, tmp_path / "latest").path == tmp_path / "step_6"

    run_ranks(work, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_3", "step_6", "latest", "best"}


def test_a_save_holds_no_collective(tmp_path: Path) -> None:
    """Rank 1 saves while rank 0 is elsewhere, and the other way round; nothing that user code sends is taken for it."""

    def work(comm: Comm) -> list[float]:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        seen = []
        for step in range(1, 6):
            if comm.rank == step % 2:
                checkpoints.save(snapshot(step, comm.rank))
            value = torch.tensor(float(step + comm.rank))
            dist.all_reduce(value)
            seen.append(value.item())
            if comm.rank != step % 2:
                checkpoints.save(snapshot(step, comm.rank))
        checkpoints.finish()
        assert loaded(checkpoints).step == 5
        return seen

    assert run_ranks(work, 2) == [[3.0, 5.0, 7.0, 9.0, 11.0]] * 2


class TestAtAFailure:
    def test_what_is_saved_already_is_not_saved_again(self, tmp_path: Path) -> None:
        def work(comm: Comm) -> list[str]:
            checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
            checkpoints.save(snapshot(4, comm.rank))  # still under way when the ranks fail
            first = checkpoints.save_at_failure(4, lambda: snapshot(4, comm.rank))
            second = checkpoints.save_at_failure(5, lambda: snapshot(5, comm.rank))
            anew = Checkpoints(tmp_path, comm, Checkpoint())
            assert loaded(anew).step == 5
            return [first, second, anew.save_at_failure(5, lambda: snapshot(5, comm.rank))]

        paths = [str(tmp_path / name) for name in ("step_4", "step_5", "step_5")]
        assert run_ranks(work, 2) == [paths, paths]
        assert {path.name for path in tmp_path.iterdir()} == {"step_4", "step_5", "latest"}

    @pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (4, 3)])
    def test_a_rank_that_can_not_say_its_state_lets_nobody_wait(
        self, tmp_path: Path, world_size: int, culprit: int
    ) -> None:
        def work(comm: Comm) -> str:
            def take() -> Snapshot:
                if comm.rank == culprit:
                    raise KeyError("ema")
                return snapshot(4, comm.rank)

            checkpoints = Checkpoints(tmp_path, comm, Checkpoint(at_failure_s=1000))
            with pytest.raises(CheckpointError) as said:
                checkpoints.save_at_failure(4, take)
            return str(said.value)

        text = f"rank {culprit} can't say what its state is: KeyError: 'ema'"
        assert run_ranks(work, world_size, timeout_s=20) == [text] * world_size
        assert not list(tmp_path.glob("*"))

    @pytest.mark.parametrize("culprit", [0, 1])
    def test_a_rank_that_dies_meanwhile_lets_nobody_wait(self, tmp_path: Path, culprit: int) -> None:
        def work(comm: Comm) -> str:
            checkpoints = Checkpoints(tmp_path, comm, Checkpoint(at_failure_s=1000))
            if comm.rank == culprit:
                os._exit(3)
            with pytest.raises(CheckpointError) as said:
                checkpoints.save_at_failure(4, lambda: snapshot(4, comm.rank))
            raise AssertionError(said.value)

        with pytest.raises(RankError) as ended:
            run_ranks(work, 2, timeout_s=20)
        assert f"rank {culprit} ended before it was written" in ended.value.errors[1 - culprit]
        assert not list(tmp_path.glob("step_*"))

    @pytest.mark.parametrize("late", [0, 1])
    def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_limit(
        self, tmp_path: Path, late: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer, "_GRACE_S", 0.2)

        def work(comm: Comm) -> str:
            checkpoints = Checkpoints(tmp_path, comm, Checkpoint(at_failure_s=0.3))
            said = ""
            if comm.rank != late:
                with pytest.raises(CheckpointError) as refused:
                    checkpoints.save_at_failure(4, lambda: snapshot(4, comm.rank))
                said = str(refused.value)
            comm.barrier("done")
            return said

        expected = ["rank 1 has not written its part in time", "rank 0 has not begun in time"][1 - late]
        said = run_ranks(work, 2, timeout_s=20)
        assert said[1 - late] == f"{expected} (checkpoint.at_failure_s=0.3)"
        assert not list(tmp_path.glob("step_*"))
