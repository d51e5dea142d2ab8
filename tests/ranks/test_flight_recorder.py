"""What torch keeps private in its flight recorder: here it shows when another version does it differently."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import safetrain.trainer
from safetrain import worker
from safetrain.comm import Comm
from safetrain.failure import Failure, read_failures
from safetrain.flight_recorder import Collective, issued_count, last_collectives
from safetrain.stacks import Frame, ask, stack_of, user_frame
from safetrain.testing import run_ranks


def test_collectives_are_recorded_with_group_number_and_shape() -> None:
    """Seen on torch 2.13, Gloo."""

    def work(comm: Comm) -> Any:
        group = dist.new_group([0, 1], group_desc="mine")
        for _ in range(8):
            dist.all_reduce(torch.ones(2, 3), group=group)
        waiting = []
        if comm.rank == 0:
            look = threading.Timer(0.5, lambda: waiting.extend(last_collectives()))
            look.start()
        else:
            time.sleep(1)
        dist.broadcast(torch.ones(4, dtype=torch.int64), src=1)
        deadline = time.monotonic() + 30
        while not all(one.done for one in last_collectives()) and time.monotonic() < deadline:
            time.sleep(0.01)  # Gloo's thread notes the end when the caller may have gone on
        return waiting, last_collectives()

    (waiting, after), _ = run_ranks(work, 2)
    mine = [one for one in after if one.about == "mine"]
    assert [one.number for one in mine] == [3, 4, 5, 6, 7, 8], "the last six of each group"
    assert [one.issued_ns for one in mine] == sorted(one.issued_ns or 0 for one in mine)
    assert 0 < time.time_ns() - (mine[-1].issued_ns or 0) < 120 * 10**9, "by the clock of time.time"
    assert mine[-1] == Collective(mine[-1].group, "mine", (), 8, "all_reduce", ((2, 3),), "Float", done=True)
    pending = [one for one in waiting if not one.done]
    assert [(one.about, one.op, one.shapes, one.dtype) for one in pending] == [
        ("default_pg", "broadcast", ((4,),), "Long")
    ]
    assert [one for one in after if not one.done] == []


def test_all_groups_count_what_is_issued_also_by_ddp() -> None:
    """Seen on torch 2.13, Gloo."""

    def work(comm: Comm) -> list[int]:
        counts = [issued_count()]
        dist.all_reduce(torch.ones(2))
        counts.append(issued_count())
        dist.barrier(group=comm.ddp_group)
        counts.append(issued_count())
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=comm.ddp_group)
        counts.append(issued_count())
        model(torch.ones(1, 2)).sum().backward()
        counts.append(issued_count())
        return [after - before for before, after in itertools.pairwise(counts)]

    for steps in run_ranks(work, 2):
        assert steps[:2] == [1, 1]
        assert steps[2] > 0, "DDP compares and sends what it wraps"
        assert steps[3] == 1, "one bucket"


def test_the_time_limit_of_a_collective_is_known() -> None:
    def work(comm: Comm) -> Any:
        dist.all_reduce(torch.ones(2), group=dist.new_group(timeout=timedelta(seconds=77), group_desc="mine"))
        return [one.timeout_s for one in last_collectives() if one.about == "mine"]

    assert run_ranks(work, 2) == [[77.0], [77.0]]


def test_safetrains_groups_are_told_apart() -> None:
    def work(comm: Comm) -> list[str]:
        comm.agree(1, "sum")
        dist.all_reduce(torch.ones(1), group=comm.ddp_group)
        return [one.about for one in last_collectives()]

    for found in run_ranks(work, 2):
        assert {"safetrain_ddp", "safetrain_control"} <= set(found)


def test_the_record_of_a_failure_holds_them(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        dist.all_reduce(torch.ones(3))
        worker._with_collectives(Failure.of(ValueError("bad label"), comm.rank, victim=False)).write(tmp_path)

    run_ranks(work, 2)
    for failure in read_failures(tmp_path):
        last = failure.collectives[-1]
        assert (last["about"], last["number"], last["op"], last["shapes"]) == ("default_pg", 1, "all_reduce", [[3]])
        assert 0 < failure.time_ns - last["issued_ns"] < 60 * 10**9


def sleep_here() -> None:
    time.sleep(1)


def test_the_stack_of_a_thread() -> None:
    thread = threading.Thread(target=sleep_here)
    thread.start()
    assert thread.ident is not None
    stack = stack_of(thread.ident)
    thread.join()
    assert stack[-1].function == "sleep_here"
    assert user_frame(stack) == stack[-1]
    assert stack[-1].source == "time.sleep(1)"
    assert user_frame([*stack, Frame(str(safetrain.trainer.__file__), 1, "fit")]) is None


def test_a_process_that_is_no_rank_does_not_answer() -> None:
    assert ask(1) == ()
