"""Checkpoints of several ranks: what comes back, who waits for whom, what is said when the disk fails."""

from __future__ import annotations

from pathlib import Path

from safetrain.checkpoint import Checkpoints
from safetrain.comm import Comm
from safetrain.config import Checkpoint
from safetrain.testing import run_ranks
from tests.states import assert_equal, own_state, shared_state, snapshot


def test_what_is_saved_comes_back(world_size: int, tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        checkpoints = Checkpoints(tmp_path, comm, Checkpoint())
        assert checkpoints.load("auto") is None
        for step in (5, 10):
            checkpoints.save(snapshot(step, comm.rank))
        checkpoints.finish()
        saved = checkpoints.load("auto")
        assert saved is not None
        assert (saved.step, saved.epoch, saved.world_size) == (10, 1, world_size)
        assert saved.config_text == "name: step 10\n"
        assert saved.path == tmp_path / "step_10"
        assert_equal(saved.shared, shared_state(10))
        assert_equal(saved.own, tuple(own_state(10, rank) for rank in range(world_size)))
        earlier = checkpoints.load(tmp_path / "step_5")
        assert earlier is not None
        assert_equal(earlier.shared, shared_state(5))

    run_ranks(work, world_size)
