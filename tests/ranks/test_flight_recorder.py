"""What torch keeps private in its flight recorder: here it shows when another version does it differently."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import safetrain.trainer
from safetrain.comm import Comm
from safetrain.flight_recorder import Collective, last_collectives
from safetrain.stacks import Frame, ask, stack_of, user_frame
from safetrain.testing import run_ranks


def test_collectives_are_recorded_with_group_number_and_shape() -> None:
    """Seen on torch 2.13, Gloo."""

    def work(comm: Comm) -> Any:
        group = dist.new_group([0, 1], group_desc="mine")
        for _ in range(5):
            dist.all_reduce(torch.ones(2, 3), group=group)
        waiting = []
        if comm.rank == 0:
            look = threading.Timer(0.5, lambda: waiting.extend(last_collectives()))
            look.start()
        else:
            time.sleep(1)
        dist.broadcast(torch.ones(4, dtype=torch.int64), src=1)
        return waiting, last_collectives()

    (waiting, after), _ = run_ranks(work, 2)
    mine = [one for one in after if one.about == "mine"]
    assert [one.number for one in mine] == [3, 4, 5], "the last three of each group"
    assert mine[-1] == Collective(mine[-1].group, "mine", (0, 1), 5, "all_reduce", ((2, 3),), "Float", done=True)
    pending = [one for one in waiting if not one.done]
    assert [(one.about, one.op, one.shapes, one.dtype) for one in pending] == [
        ("default_pg", "broadcast", ((4,),), "Long")
    ]
    assert all(one.done for one in after)


def test_safetrains_groups_are_told_apart() -> None:
    def work(comm: Comm) -> list[str]:
        comm.agree(1, "sum")
        dist.all_reduce(torch.ones(1), group=comm.ddp_group)
        return [one.about for one in last_collectives()]

    for found in run_ranks(work, 2):
        assert {"safetrain_ddp", "safetrain_control"} <= set(found)


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
