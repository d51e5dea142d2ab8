"""User collectives that do not belong together are paired all the same: the next vote ends the job, with both lines.

Two collectives of the user's own in ``training_step``; one rank does something else in step 2. Nothing hangs: every
fault here is one that Gloo answers with wrong numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as imported_by_name

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.toys import Classifier, dataset, momentum_sgd

FAULTY_STEP = 2
PLACES = pytest.mark.parametrize(
    ("world_size", "culprit"), [(2, 0), (2, 1), (4, 0), (4, 3)], ids=lambda value: str(value)
)
Fault = Callable[[bool], None]


def swapped(odd: bool) -> None:
    a, b = torch.ones(3), torch.zeros(3)
    if odd:
        mean(b)
    mean(a)
    if not odd:
        mean(b)


def mean(x: torch.Tensor) -> None:  # both go through this line: what tells them apart is who calls
    dist.all_reduce(x)


def swapped_by_a_set(odd: bool) -> None:
    tensors = {"loss": torch.ones(3), "accuracy": torch.zeros(3)}
    for name in ["loss", "accuracy"] if odd else ["accuracy", "loss"]:
        if name == "loss":
            mean(tensors[name])
        else:
            mean(tensors[name] + 1)


def swapped_sizes(odd: bool) -> None:
    for size in [(2, 6), (3, 4)] if odd else [(3, 4), (2, 6)]:
        dist.all_reduce(torch.ones(size))


def other_dtype(odd: bool) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))


def other_reduce_op(odd: bool) -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)


def other_shape_of_equal_size(odd: bool) -> None:  # H16
    mine = torch.ones((2, 6) if odd else (3, 4))
    dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)


def one_left_out(odd: bool) -> None:
    works = [dist.all_reduce(torch.ones(4), async_op=True)]
    if not odd:
        works.append(dist.all_reduce(torch.ones(4), async_op=True))
    PENDING.extend(works)  # waited for later, or never


def each_leaves_another_one_out(odd: bool) -> None:
    loss, accuracy = torch.ones(1), torch.zeros(1)
    if not odd:
        dist.all_reduce(loss)
    if odd:
        dist.all_reduce(accuracy)


def hidden_broadcast(odd: bool) -> None:  # H08: the innocent property, read on one rank only
    if odd:
        PENDING.append(dist.broadcast(torch.ones(4), src=dist.get_rank(), async_op=True))


def other_group(odd: bool) -> None:
    PENDING.append(dist.all_reduce(torch.ones(4), group=GROUPS[odd], async_op=True))


def imported(odd: bool) -> None:
    imported_by_name(torch.ones(4), op=dist.ReduceOp.MIN if odd else dist.ReduceOp.MAX)


PENDING: list[Any] = []
GROUPS: list[dist.ProcessGroup] = []


class WithCollectives(Classifier):
    fault: Fault
    culprit: int

    def training_step(self, batch: Any) -> Any:
        self.fault(self.comm.rank == self.culprit and self.step >= FAULTY_STEP)
        return super().training_step(batch)


def train(comm: Comm, fault: Fault, culprit: int, audit: safetrain.Audit | None = None) -> tuple[str, int]:
    GROUPS[:] = [dist.new_group(), dist.new_group()]
    trainer = WithCollectives(
        torch.nn.Linear(8, 4), dataset(24 * comm.world_size), optimizer=momentum_sgd,
        loader=safetrain.Loader(batch_size=4), audit=audit,
    )  # fmt: skip
    trainer.fault, trainer.culprit = fault, culprit  # type: ignore[method-assign]
    try:
        trainer.fit()
    except safetrain.RanksDiffer as error:
        return str(error), error.step
    return "", trainer.step


def lines_of(fault: Fault, *texts: str) -> list[str]:
    """``file:line`` of each text in the source of ``fault``."""
    source, first = inspect.getsourcelines(fault)
    return [
        f"{__file__}:{first + number}" for text in texts for number, line in enumerate(source) if text in line
    ]  # fmt: skip


EXPECTED: list[tuple[Fault, str, list[str]]] = [
    (swapped, "from different lines", lines_of(swapped, "mean(a)")[:1] + lines_of(mean, "dist.")),
    (swapped_by_a_set, "in another order", lines_of(swapped_by_a_set, "mean(t") + lines_of(mean, "dist.")),
    (swapped_sizes, "in another order", lines_of(swapped_sizes, "dist.all_reduce")),
    (other_dtype, "int32[4]", lines_of(other_dtype, "dist.")),
    (other_reduce_op, "all_reduce(MAX)", lines_of(other_reduce_op, "dist.")),
    (other_shape_of_equal_size, "float32[2, 6]", lines_of(other_shape_of_equal_size, "dist.all_gather")),
    (one_left_out, "left out", lines_of(one_left_out, "works.append")),
    (each_leaves_another_one_out, "from different lines", lines_of(each_leaves_another_one_out, "dist.all")),
    (hidden_broadcast, "broadcast(root ", lines_of(hidden_broadcast, "dist.broadcast")),
    (other_group, "nothing more", lines_of(other_group, "dist.")),
    (imported, "all_reduce(MIN)", lines_of(imported, "imported_by_name(")),
]


@PLACES
@pytest.mark.parametrize(("fault", "words", "lines"), EXPECTED, ids=[fault.__name__ for fault, *_ in EXPECTED])
def test_the_next_vote_ends_the_job_with_both_sides(
    world_size: int, culprit: int, fault: Fault, words: str, lines: list[str]
) -> None:
    results = run_ranks(train, world_size, fault, culprit)
    texts = {text for text, _ in results}
    assert len(texts) == 1, "all ranks say the same"
    text = texts.pop()
    assert {step for _, step in results} == {FAULTY_STEP}
    assert text.startswith(f"step {FAULTY_STEP}: the ranks ")
    assert words in text
    assert f"rank {culprit}: " in text
    for line in lines:
        assert line in text
    assert "safetrain/" not in text


def work_alike(comm: Comm, step: int) -> None:
    """What ranks may do differently."""
    x, rank = torch.ones(4), comm.rank
    if rank == 0:  # the two ends of a broadcast, on lines of their own
        dist.broadcast(x, src=0)
    else:
        x = torch.empty(4)
        dist.broadcast(x, src=0)
    if rank != 0:  # "rank 0 first"
        dist.barrier()
    if rank == 0:
        dist.barrier()
    if step % 2 == rank % 2:  # no data here: take part with zeros
        dist.all_reduce(torch.zeros(1))
    else:
        dist.all_reduce(torch.ones(1))
    early_return(rank)
    dist.gather(x, [torch.empty(4) for _ in range(comm.world_size)] if rank == 0 else None)
    dist.broadcast_object_list(["x" * 10 if rank == 0 else None], src=0)
    dist.all_gather_object([None] * comm.world_size, "x" * rank)
    mine = GROUPS[rank >= comm.world_size // 2]  # each half in a group of its own
    for _ in range(1 + (rank >= comm.world_size // 2)):
        dist.all_reduce(torch.ones(2 + dist.get_world_size(mine)), group=mine)
    if rank == 0:
        dist.send(x, dst=1)
    if rank == 1:
        dist.recv(x, src=0)
    assert comm.agree(rank, "max") == comm.world_size - 1


def early_return(rank: int) -> None:
    if rank == 1:
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)
        return
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)


def test_what_may_differ_between_ranks_is_no_fault(world_size: int) -> None:
    def work(comm: Comm) -> Any:
        half = comm.world_size // 2
        GROUPS[:] = [dist.new_group(list(range(half))), dist.new_group(list(range(half, comm.world_size)))]
        warnings: list[str] = []

        class Trainer(Classifier):
            def training_step(self, batch: Any) -> Any:
                work_alike(self.comm, self.step)
                return super().training_step(batch)

        import logging

        handler = logging.Handler()
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("safetrain").addHandler(handler)
        trainer = Trainer(
            torch.nn.Linear(8, 4), dataset(24 * comm.world_size), optimizer=momentum_sgd,
            loader=safetrain.Loader(batch_size=4),
        )  # fmt: skip
        gathers = 0
        judge = comm.collectives.judge

        def counting(calls: Any) -> str:
            nonlocal gathers
            gathers += 1
            return judge(calls)

        comm.collectives.judge = counting  # type: ignore[method-assign]
        steps = trainer.fit().step
        return steps, warnings, gathers

    for steps, warnings, gathers in run_ranks(work, world_size):
        assert steps == 6
        assert not warnings
        assert gathers <= 3, "the pairs of lines are known after the first steps"


def test_other_branches_elsewhere_are_one_warning() -> None:
    """Two functions that issue the same collective: nothing says whether they are meant to meet."""

    def here() -> None:
        dist.all_reduce(torch.ones(1))

    def work(comm: Comm) -> Any:
        import logging

        warnings: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("safetrain").addHandler(handler)

        class Trainer(Classifier):
            def training_step(self, batch: Any) -> Any:
                call(here) if self.comm.rank else elsewhere()
                return super().training_step(batch)

        trainer = Trainer(
            torch.nn.Linear(8, 4), dataset(48), optimizer=momentum_sgd, loader=safetrain.Loader(batch_size=4)
        )
        return trainer.fit().step, warnings

    for steps, warnings in run_ranks(work, 2):
        assert steps == 6
        assert len(warnings) == 1
        assert "different places" in warnings[0]


def call(function: Callable[[], None]) -> None:
    function()


def elsewhere() -> None:
    dist.all_reduce(torch.ones(1))


def test_it_can_be_switched_off() -> None:
    results = run_ranks(train, 2, other_reduce_op, 1, safetrain.Audit(collectives=False))
    assert results == [("", 6), ("", 6)]


def test_torch_is_left_as_it_was() -> None:
    def work(comm: Comm) -> bool:
        before = comm.collectives._originals | {"new_group": comm._new_group}
        comm.leave()
        now = {name: dist.ProcessGroup.__dict__[name] for name in before if name != "new_group"}
        return before == now | {"new_group": dist.new_group} and len(before) > 10

    assert run_ranks(work, 2) == [True, True]


@PLACES
def test_a_difference_after_the_last_vote_is_found_at_the_end(world_size: int, culprit: int) -> None:
    class Trainer(Classifier):
        def validation_step(self, batch: Any) -> None:
            other_reduce_op(self.comm.rank == culprit)

    def work(comm: Comm) -> str:
        trainer = Trainer(
            torch.nn.Linear(8, 4), dataset(8 * world_size), dataset(world_size), optimizer=momentum_sgd,
            loader=safetrain.Loader(batch_size=4),
        )  # fmt: skip
        with pytest.raises(safetrain.RanksDiffer) as caught:
            trainer.fit()
        return str(caught.value)

    texts = set(run_ranks(work, world_size))
    assert len(texts) == 1
    assert "all_reduce(MAX)" in texts.pop()


def test_h20_a_group_made_of_other_ranks_is_told_at_once() -> None:
    def work(comm: Comm) -> str:
        with pytest.raises(safetrain.RanksDiffer) as caught:
            dist.new_group([0, 3] if comm.rank in (0, 3) else [1, 2])
        return str(caught.value)

    texts = set(run_ranks(work, 4))
    assert len(texts) == 1
    text = texts.pop()
    assert "ranks 0 and 3: barrier('new_group([0, 3])') at " in text
    assert "ranks 1 and 2: barrier('new_group([1, 2])') at " in text


def test_h24_empty_tensors_can_be_gathered() -> None:
    def work(comm: Comm) -> list[int]:
        gathered = [torch.empty(1, 0, 2) for _ in range(comm.world_size)]
        dist.all_gather(gathered, torch.empty(1, 0, 2))
        return [x.numel() for x in gathered]

    assert run_ranks(work, 2) == [[0, 0], [0, 0]]
