"""Steps recorded on all ranks: one trace, a lane a rank, collectives joined, and the same weights as without."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import safetrain
import safetrain.profiling
from safetrain.activity import ACTIVITY
from safetrain.comm import Comm
from safetrain.profiling import StepProfile
from safetrain.testing import differences, run_ranks
from tests.ranks.toys import Classifier, dataset, mlp, momentum_sgd, state

START, COUNT, ACCUMULATE = 3, 2, 2
BUCKETS, BUFFER_BROADCASTS = 2, 2  # a step: 1 KiB each, the ballot in the last; floats and the count of batches
PHASES = {"data", "sync_buffers", "forward", "backward", "vote", "optimizer", "logging", "checkpoint"}


def train(comm: Comm, run_dir: Path, profile: bool, steps: int = 7, start: int = START) -> dict[str, torch.Tensor]:
    trainer = Classifier(
        mlp(norm=True),
        dataset(64 * comm.world_size),
        optimizer=momentum_sgd,
        loop=safetrain.Loop(max_steps=steps, epochs=9, accumulate=ACCUMULATE, log_every_steps=4),
        loader=safetrain.Loader(batch_size=4),
        checkpoint=safetrain.Checkpoint(every_steps=4, every_minutes=None),
        strategy=safetrain.DDPStrategy(bucket_cap_mb=0.001),
        observers=[StepProfile(start, COUNT)] if profile else [],
        resume="auto",
        run_dir=run_dir,
    )
    trainer.fit()
    return state(trainer)


def read(run_dir: Path) -> dict[str, Any]:
    (path,) = (run_dir / "traces").glob("*.json.gz")
    with gzip.open(path, "rt") as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def test_one_trace_of_all_ranks(world_size: int, tmp_path: Path) -> None:
    profiled = run_ranks(train, world_size, tmp_path / "with", True)
    plain = run_ranks(train, world_size, tmp_path / "without", False)
    for rank in (0, world_size - 1):
        assert differences(profiled[rank], plain[rank]) == []

    trace = read(tmp_path / "with")
    assert trace["safetrain"]["ranks"] == world_size
    assert trace["safetrain"]["missing"] == []
    assert trace["safetrain"]["clocks"] == "one machine, one clock"
    assert [path.name for path in (tmp_path / "with" / "traces").iterdir()] == ["steps_3-4.json.gz"]
    events = trace["traceEvents"]
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(lanes) == list(range(world_size))
    assert {e["pid"] for e in events} == set(lanes)
    for rank in (0, world_size - 1):
        assert lanes[rank].startswith(f"rank {rank} (")
        own = [e for e in events if e["pid"] == rank]
        assert [e["name"] for e in own if e.get("cat") == "step"] == ["step 3", "step 4"]
        phases = [e for e in own if e.get("cat") == "phase"]
        assert {e["name"] for e in phases} == PHASES
        assert Counter(e["name"] for e in phases)["forward"] == COUNT * ACCUMULATE
        ends = [e["ts"] + e["dur"] for e in phases]
        assert all(abs(e["ts"] - end) < 0.01 for e, end in zip(phases[1:], ends, strict=False)), "no gap, no overlap"
        assert any(e["name"] == "aten::addmm" and e["args"]["Input Dims"] for e in own), "with shapes"
        lines = [e["name"] for e in own if e.get("cat") == "python_function"]
        assert any("toys.py" in line and "training_step" in line for line in lines), "with stacks"
        (names,) = [[e["args"]["name"] for e in own if e["name"] == "thread_name" and e["tid"] == 10**9]]
        assert names == ["the loop"]


def test_collectives_of_the_same_call_are_joined(world_size: int, tmp_path: Path) -> None:
    run_ranks(train, world_size, tmp_path, True)
    trace = read(tmp_path)
    of_the_log = 1  # step 4 is a multiple of log_every_steps
    joined = COUNT * (BUCKETS + BUFFER_BROADCASTS) + of_the_log
    assert trace["safetrain"]["collectives_joined"] == joined
    arrows = [e for e in trace["traceEvents"] if e.get("cat") == "collective" and e["ph"] in "stf"]
    assert Counter(e["ph"] for e in arrows) == Counter(s=joined, f=joined, t=joined * (world_size - 2))
    calls = [e for e in trace["traceEvents"] if e.get("cat") == "collective" and e["ph"] == "X"]
    for rank in (0, world_size - 1):
        own = Counter((e["args"]["group"], e["name"]) for e in calls if e["pid"] == rank)
        assert own["safetrain_ddp", "all_reduce"] == COUNT * BUCKETS
        assert own["safetrain_ddp", "broadcast"] == COUNT * BUFFER_BROADCASTS
        assert own["safetrain_control", "all_reduce"] == of_the_log
    for number in {e["id"] for e in arrows}:
        ends = [e for e in arrows if e["id"] == number]
        assert {e["pid"] for e in ends} == set(range(world_size))
        assert [e["ts"] for e in ends] == sorted(e["ts"] for e in ends)
        met = [c for e in ends for c in calls if (c["pid"], c["tid"], c["ts"]) == (e["pid"], e["tid"], e["ts"])]
        assert len(met) == world_size, "an arrow touches each rank's call"
        assert len({(c["args"]["group"], c["args"]["number"], str(c["args"]["shapes"])) for c in met}) == 1
    for call in calls:
        assert call["dur"] > 1, "its end is known"


def train_without_a_disk(comm: Comm, run_dir: Path) -> str:
    if comm.rank == comm.world_size - 1:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        safetrain.profiling.write_part = full  # type: ignore[attr-defined]
    safetrain.profiling._AT_THE_END_WITHIN_S = 0.1  # type: ignore[attr-defined]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train(comm, run_dir, True)
    return said.getvalue()


def test_a_trace_without_a_rank_says_so_and_its_parts_stay(tmp_path: Path) -> None:
    said, _ = run_ranks(train_without_a_disk, 2, tmp_path)
    assert "profile: steps 3-4 of 1 rank in" in said
    assert "rank 1 has no part in it" in said
    trace = read(tmp_path)
    assert trace["safetrain"]["missing"] == [1]
    assert {e["pid"] for e in trace["traceEvents"]} == {0}
    assert [path.name for path in (tmp_path / "traces" / "parts").iterdir()] == ["steps_3-4.rank_0.jsonl.gz"]


def train_shortly(comm: Comm, run_dir: Path, steps: int) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train(comm, run_dir, True, steps)
    return said.getvalue()


def test_a_run_that_ends_before_the_window_says_so(tmp_path: Path) -> None:
    said, other = run_ranks(train_shortly, 2, tmp_path, 3)
    assert "profile: nothing was recorded: the run ended after 3 steps, and profile.start is 3." in said
    assert "profile" not in other
    assert not (tmp_path / "traces").exists()


def test_a_run_that_ends_inside_the_window_has_what_it_had(tmp_path: Path) -> None:
    said, _ = run_ranks(train_shortly, 2, tmp_path, 4)
    assert "profile: step 3 of 2 ranks in" in said
    steps = {e["name"] for e in read(tmp_path)["traceEvents"] if e.get("cat") == "step"}
    assert steps == {"step 3"}


def go_on(comm: Comm, run_dir: Path) -> None:
    train(comm, run_dir, profile=False, steps=4)
    train(comm, run_dir, profile=True, steps=7, start=1)


def test_a_run_that_goes_on_behind_the_window_records_its_first_steps(tmp_path: Path) -> None:
    run_ranks(go_on, 2, tmp_path)
    events = read(tmp_path)["traceEvents"]
    for rank in (0, 1):
        steps = [e["name"] for e in events if e.get("cat") == "step" and e["pid"] == rank]
        assert steps == ["step 4", "step 5"]


class Fails(Classifier):
    culprit = 0

    def training_step(self, batch: Any) -> Any:
        if self.step == START + 1 and self.comm.rank == self.culprit:
            raise ValueError("bad label")
        return super().training_step(batch)


def fail(comm: Comm, run_dir: Path, culprit: int) -> str:
    trainer = Fails(
        mlp(),
        dataset(64 * comm.world_size),
        optimizer=momentum_sgd,
        loader=safetrain.Loader(batch_size=4),
        checkpoint=safetrain.Checkpoint(at_failure_s=0),
        observers=[StepProfile(START, COUNT)],
        run_dir=run_dir,
    )
    trainer.culprit = culprit
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(safetrain.SafetrainError):
        trainer.fit()
    assert not ACTIVITY.listeners
    torch.autograd.profiler.profile(use_kineto=True).__enter__().__exit__(None, None, None)  # the recording has ended
    return said.getvalue()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_in_the_window_is_not_held_up(culprit: int, tmp_path: Path) -> None:
    said, other = run_ranks(fail, 2, tmp_path, culprit)
    assert f"profile: nothing is written: the run failed at step {START + 1}, while it was recorded" in said
    assert "profile" not in other
    assert not (tmp_path / "traces").exists()
