"""One rank is different: it skips, runs out of memory or data, takes another branch, breaks: all do the same then.

Every case runs on 2 and 4 ranks, with the fault on rank 0 and on the last one, with buckets so small that backward
breaks between them. A dropped window must leave no trace: the run equals, to the bit and with its buffers, one that
never had it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import safetrain
from safetrain.comm import Comm
from safetrain.policies import (
    NonFiniteStop,
    OutOfMemoryStop,
    Policies,
    SkipAll,
    SkipAny,
    SkipPartial,
    UnevenContinue,
    UnevenStop,
    UnusedStop,
)
from safetrain.testing import run_ranks
from tests.ranks.toys import (
    CLASSES,
    FEATURES,
    Classifier,
    PerRank,
    adamw,
    assert_close,
    assert_same,
    momentum_sgd,
    ready,
    samples,
    state,
    train_alone,
)

SMALL_BUCKETS = safetrain.DDPStrategy(bucket_cap_mb=0.0005)
RANKS = pytest.mark.parametrize(
    ("world_size", "faulty"), [(2, 0), (2, 1), (4, 0), (4, 3)], ids=lambda value: str(value)
)


class Boom(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a test)")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, fault: str = "") -> torch.Tensor:
        if fault == "backward breaks at its end":
            x = Boom.apply(x.requires_grad_())
        x = self.norm(self.a(x)).relu()
        if fault == "backward breaks in the middle":
            x = Boom.apply(x)
        x = self.c(self.b(x).relu())
        return Boom.apply(x) if fault == "backward breaks at its start" else x


class Faulty(safetrain.Trainer):
    """Does what the batch says."""

    def training_step(self, batch: Any) -> Any:
        x, y, fault = batch
        logits = self.model(x, fault)
        loss = F.cross_entropy(logits, y)
        if fault == "None":
            return None
        if fault == "SkipBatch":
            raise safetrain.SkipBatch("too short")
        if fault == "constant":
            return torch.tensor(1.0)
        if fault == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a test)")
        if fault == "NaN":
            return loss * float("nan")
        if fault == "error":
            raise KeyError("label 7")
        if fault == "offered":
            return safetrain.Loss(loss, skip=True)
        return loss


def batches(world_size: int, steps: int, faults: dict[tuple[int, int], Any]) -> list[list[Any]]:
    """``faults`` maps (rank, step) to a fault; an exception is raised by the dataset itself."""
    made = []
    for rank in range(world_size):
        mine: list[Any] = []
        for step in range(steps):
            fault = faults.get((rank, step), "")
            mine.append(fault if isinstance(fault, Exception) else (*samples(4, seed=100 * rank + step), fault))
        made.append(mine)
    return made


def train(
    comm: Comm,
    data: Sequence[Sequence[Any]],
    policies: Policies | None = None,
    optimizer: Any = momentum_sgd,
    accumulate: int = 1,
) -> tuple[dict[str, torch.Tensor], int, int]:
    trainer = Faulty(
        Net(),
        ready(PerRank(data)),
        optimizer=optimizer,
        strategy=SMALL_BUCKETS,
        policies=policies,
        loop=safetrain.Loop(clip_norm=1.0, accumulate=accumulate, nominal_weight=4, log_every_steps=1),
    )
    result = trainer.fit()
    return state(trainer), result.step, result.applied_steps


DROPPED = [
    "None",
    "SkipBatch",
    "constant",
    "out of memory",
    "NaN",
    "backward breaks at its start",
    "backward breaks in the middle",
    "backward breaks at its end",
    safetrain.SkipBatch("raised by the dataset"),
]


@RANKS
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_dropped_window_leaves_no_trace(world_size: int, faulty: int, accumulate: int) -> None:
    """Each fault in turn, good windows between them; of three micro-batches the second or the last is faulty."""
    windows = 2 * len(DROPPED) + 1
    faulty_windows = range(1, windows, 2)
    faults = {
        (faulty, window * accumulate + (accumulate // 2 if i % 2 else accumulate - 1)): DROPPED[i]
        for i, window in enumerate(faulty_windows)
    }
    data = batches(world_size, windows * accumulate, faults)
    good = [i for i in range(windows * accumulate) if i // accumulate not in faulty_windows]
    without = [[mine[i] for i in good] for mine in data]

    def work(comm: Comm) -> Any:
        weights, steps, applied = train(comm, data, accumulate=accumulate)
        expected, _, _ = train(comm, without, accumulate=accumulate)
        return weights, expected, steps, applied

    results = run_ranks(work, world_size)
    for weights, expected, steps, applied in results:
        assert (steps, applied) == (windows, windows - len(DROPPED))
        for name, value in weights.items():
            assert torch.equal(value, expected[name]), name
    assert_same([weights for weights, *_ in results])


@RANKS
@pytest.mark.parametrize("fault", ["error", ValueError("unreadable sample 17")], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_any_other_exception_stops_all_ranks_at_the_same_step(
    world_size: int, faulty: int, fault: Any, accumulate: int
) -> None:
    data = batches(world_size, 6 * accumulate, {(faulty, 3 * accumulate): fault})

    def work(comm: Comm) -> Any:
        trainer = Faulty(
            Net(),
            ready(PerRank(data)),
            optimizer=adamw,
            strategy=SMALL_BUCKETS,
            loop=safetrain.Loop(accumulate=accumulate),
        )
        try:
            trainer.fit()
        except (safetrain.RankFailed, safetrain.PeerFailed) as error:
            return type(error).__name__, str(error), repr(error.__cause__), error.step, trainer.step, state(trainer)
        return None

    results = run_ranks(work, world_size)
    for rank, (kind, text, cause, step, trainer_step, _) in enumerate(results):
        assert kind == ("RankFailed" if rank == faulty else "PeerFailed")
        assert f"rank {faulty} failed at step 3" in text
        assert step == trainer_step == 3
        if fault == "error":
            assert "KeyError: 'label 7' in training_step at " in text
            assert "test_faults.py:" in text
        else:
            assert "ValueError: unreadable sample 17 in the data set at " in text
            assert "toys.py:" in text
        if rank == faulty:
            assert cause == repr(KeyError("label 7") if fault == "error" else fault)
    assert_same([{k: v for k, v in r[-1].items() if "running" not in k} for r in results])


def joined(data: Sequence[Sequence[Any]], leave_out: set[tuple[int, int]]) -> list[list[Any]]:
    steps = max(map(len, data))
    return [
        [mine[step][:2] for rank, mine in enumerate(data) if step < len(mine) and (rank, step) not in leave_out]
        for step in range(steps)
    ]


class Plain(Classifier):
    """Without BatchNorm, so that one process on the joined batch is the reference."""

    def training_step(self, batch: Any) -> Any:
        x, y, fault = batch
        loss = F.cross_entropy(self.model(x), y)
        if fault == "None":
            return None
        return safetrain.Loss(loss, skip=True) if fault == "offered" else loss


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def train_plain(comm: Comm, data: Any, policies: Policies) -> tuple[dict[str, torch.Tensor], int]:
    trainer = Plain(
        plain_net(),
        ready(PerRank(data)),
        optimizer=momentum_sgd,
        strategy=SMALL_BUCKETS,
        policies=policies,
        loop=safetrain.Loop(nominal_weight=4),
    )
    applied = trainer.fit().applied_steps
    return state(trainer), applied


@RANKS
@pytest.mark.parametrize(
    ("policy", "fault", "left_out", "dropped"),
    [
        (SkipAny(), "None", False, True),
        (SkipAny(), "offered", False, True),
        (SkipPartial(), "None", True, False),
        (SkipPartial(), "offered", True, False),
        (SkipAll(), "None", True, False),
        (SkipAll(), "offered", False, False),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, bool)) else str(value),
)
def test_skip_policies(world_size: int, faulty: int, policy: Any, fault: str, left_out: bool, dropped: bool) -> None:
    data = batches(world_size, 5, {(faulty, 2): fault})
    windows = joined(data, {(faulty, 2)} if left_out else set())
    if dropped:
        del windows[2]

    def work(comm: Comm) -> Any:
        return train_plain(comm, data, Policies(skip=policy))

    results = run_ranks(work, world_size)
    assert [applied for _, applied in results] == [len(windows)] * world_size
    assert_same([weights for weights, _ in results])
    assert_close(results[-1][0], train_alone(plain_net(), windows))


@pytest.mark.parametrize("policy", [SkipAll(), SkipPartial()], ids=["all", "partial"])
def test_a_window_that_every_rank_wants_to_skip_is_skipped(policy: Any) -> None:
    data = batches(2, 4, {(0, 1): "offered", (1, 1): "offered"})
    windows = [w for i, w in enumerate(joined(data, set())) if i != 1]

    def work(comm: Comm) -> Any:
        return train_plain(comm, data, Policies(skip=policy))

    results = run_ranks(work, 2)
    assert [applied for _, applied in results] == [3, 3]
    assert_close(results[-1][0], train_alone(plain_net(), windows))


@RANKS
@pytest.mark.parametrize("policy", [UnevenStop(), UnevenContinue()], ids=["stop", "continue"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_rank_runs_out_of_data(world_size: int, faulty: int, policy: Any, accumulate: int) -> None:
    """It has 3 batches, the others 5: nobody waits, and what is used is weighted exactly."""
    data = batches(world_size, 5, {})
    data[faulty] = data[faulty][:3]
    micro = joined(data, set())
    windows = [list(chain.from_iterable(micro[i : i + accumulate])) for i in range(0, 5, accumulate)]
    if isinstance(policy, UnevenStop):
        windows = windows[: -(-3 // accumulate)]

    def work(comm: Comm) -> Any:
        trainer = Plain(
            plain_net(),
            ready(PerRank(data)),
            optimizer=adamw,
            strategy=SMALL_BUCKETS,
            policies=Policies(uneven=policy),
            loop=safetrain.Loop(accumulate=accumulate, nominal_weight=4, log_every_steps=1),
        )
        result = trainer.fit()
        return state(trainer), result.applied_steps, result.step

    results = run_ranks(work, world_size)
    assert [(applied, step) for _, applied, step in results] == [(len(windows), len(windows))] * world_size
    assert_same([weights for weights, *_ in results])
    assert_close(results[-1][0], train_alone(plain_net(), windows, adamw))


def test_a_rank_without_any_data_and_two_epochs() -> None:
    data = batches(2, 3, {})
    data[1] = []
    windows = joined(data, set()) * 2

    def work(comm: Comm) -> Any:
        trainer = Plain(
            plain_net(),
            ready(PerRank(data)),
            optimizer=momentum_sgd,
            policies=Policies(uneven=UnevenContinue()),
            loop=safetrain.Loop(epochs=2, nominal_weight=4),
        )
        result = trainer.fit()
        return state(trainer), result.applied_steps

    results = run_ranks(work, 2)
    assert [applied for _, applied in results] == [6, 6]
    assert_close(results[1][0], train_alone(plain_net(), windows))


class Branches(nn.Module):
    """Which layers run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = (
            nn.Linear(FEATURES, FEATURES),
            nn.Linear(FEATURES, FEATURES),
            nn.Linear(FEATURES, CLASSES),
        )
        self.never = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        if "a" in use:
            x = x + self.a(x).tanh()
        if "b" in use:
            x = x + self.b(x).tanh()
        return self.head(x)


class BranchTrainer(safetrain.Trainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        x, y, use = batch
        return F.cross_entropy(self.model(x, use), y)


@RANKS
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make_optimizer", [momentum_sgd, adamw], ids=["momentum", "adamw"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_ranks_take_different_branches(
    world_size: int, faulty: int, accumulate: int, make_optimizer: partial[Any], views: bool
) -> None:
    """A layer is used on one rank only, in the last micro-batch only, or for some steps nowhere: as None there."""
    steps = 8
    data: list[list[Any]] = []
    for rank in range(world_size):
        mine = []
        for i in range(steps * accumulate):
            step, micro = divmod(i, accumulate)
            use = ""
            if step < 5 and (rank == faulty) == (step % 2 == 0):
                use += "a"
            if micro == (step + rank) % accumulate and step not in (3, 4, 5):
                use += "b"
            mine.append((*samples(4, seed=100 * rank + i), use))
        data.append(mine)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0], batch[2]), batch[1], reduction="sum")

    windows = [
        [data[rank][step * accumulate + micro] for rank in range(world_size) for micro in range(accumulate)]
        for step in range(steps)
    ]
    reference_optimizer = partial(make_optimizer)
    expected = _train_branches(windows, reference_optimizer, loss)

    def work(comm: Comm) -> Any:
        trainer = BranchTrainer(
            Branches(),
            ready(PerRank(data)),
            optimizer=make_optimizer,
            strategy=safetrain.DDPStrategy(bucket_cap_mb=0.0005, gradient_as_bucket_view=views),
            loop=safetrain.Loop(accumulate=accumulate, nominal_weight=4),
        )
        assert trainer.fit().applied_steps == steps
        return state(trainer)

    states = run_ranks(work, world_size)
    assert_same(states)
    assert_close(states[-1], expected)
    assert torch.equal(states[-1]["never.weight"], Branches().never.weight)


def _train_branches(windows: Any, make_optimizer: Any, loss: Any) -> dict[str, torch.Tensor]:
    model = Branches()
    optimizer = make_optimizer(model.parameters())
    for window in windows:
        optimizer.zero_grad(set_to_none=True)
        count = sum(len(batch[1]) for batch in window)
        for batch in window:
            (loss(model, batch) / count).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@RANKS
def test_an_unused_parameter_is_named_once_with_its_rank(world_size: int, faulty: int) -> None:
    data = [[(*samples(4, seed=s), "b" if rank == faulty else "ab") for s in range(3)] for rank in range(world_size)]

    def work(comm: Comm) -> list[str]:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("safetrain").addHandler(handler)
        BranchTrainer(Branches(), ready(PerRank(data)), optimizer=momentum_sgd).fit()
        return records

    for rank, records in enumerate(run_ranks(work, world_size)):
        names = "a.weight, a.bias, never.weight, never.bias" if rank == faulty else "never.weight, never.bias"
        assert len(records) == 1
        assert records[0].startswith(f"rank {rank}, step 0: no gradient for {names}. ")


@RANKS
def test_unused_stop_ends_the_job_with_the_names(world_size: int, faulty: int) -> None:
    data = [
        [(*samples(4, seed=s), "b" if rank == faulty and s == 2 else "ab") for s in range(4)]
        for rank in range(world_size)
    ]

    def work(comm: Comm) -> Any:
        model = Branches()
        model.never.requires_grad_(False)
        trainer = BranchTrainer(
            model, ready(PerRank(data)), optimizer=momentum_sgd, policies=Policies(unused=UnusedStop())
        )
        try:
            trainer.fit()
        except (safetrain.RankFailed, safetrain.PeerFailed) as error:
            return type(error).__name__, str(error), trainer.step
        return None

    for rank, (kind, text, step) in enumerate(run_ranks(work, world_size)):
        assert kind == ("RankFailed" if rank == faulty else "PeerFailed")
        assert f"rank {faulty} failed at step 2" in text
        assert "no gradient for a.weight, a.bias" in text
        assert step == 2


@pytest.mark.parametrize(
    ("policies", "fault", "words"),
    [
        (Policies(skip=SkipAny(2)), "None", "skip (rank 1), 3 window(s) in a row, and policy.skip.max_consecutive=2"),
        (Policies(), "out of memory", "memory (rank 1), 4 window(s) in a row, and policy.out_of_memory.max_"),
        (Policies(out_of_memory=OutOfMemoryStop()), "out of memory", "out of memory (rank 1), 1 window(s)"),
        (Policies(non_finite=NonFiniteStop()), "NaN", "non-finite gradient, 1 window(s)"),
    ],
)  # fmt: skip
def test_a_limit_of_consecutive_drops_ends_the_job_on_all_ranks(policies: Policies, fault: str, words: str) -> None:
    data = batches(2, 12, {(1, step): fault for step in range(1, 12)})

    def work(comm: Comm) -> Any:
        try:
            train(comm, data, policies)
        except safetrain.TrainingStopped as error:
            return str(error), error.remedy
        return None

    told = run_ranks(work, 2)
    assert told[0] == told[1]
    text, remedy = told[0]
    assert words in text
    assert ("The first gradient that is not finite is that of " in text) == (fault == "NaN")
    change = {"None": "look at the batches", "NaN": "loop.clip_norm", "out of memory": "a smaller loader.batch_size"}
    assert change[fault] in remedy


@RANKS
def test_stop_on_one_rank_stops_all_after_the_same_step(world_size: int, faulty: int) -> None:
    data = batches(world_size, 8, {})

    class Stops(Plain):
        def training_step(self, batch: Any) -> Any:
            if self.step == 4 and self.comm.rank == faulty:
                self.stop()
            return super().training_step(batch)

    def work(comm: Comm) -> Any:
        trainer = Stops(plain_net(), ready(PerRank(data)), optimizer=momentum_sgd)
        result = trainer.fit()
        return result.step, state(trainer)

    results = run_ranks(work, world_size)
    assert [step for step, _ in results] == [5] * world_size
    assert_same([weights for _, weights in results])


@RANKS
def test_validation_that_fails_on_one_rank_stops_all(world_size: int, faulty: int) -> None:
    class Breaks(Plain):
        def validation_step(self, batch: Any) -> None:
            if self.comm.rank == faulty:
                raise IndexError("class 12 of 10")

    def work(comm: Comm) -> Any:
        data = batches(world_size, 2, {})
        try:
            Breaks(plain_net(), ready(PerRank(data)), ready(PerRank(data)), optimizer=momentum_sgd).fit()
        except (safetrain.RankFailed, safetrain.PeerFailed) as error:
            return type(error).__name__, str(error)
        return None

    for rank, (kind, text) in enumerate(run_ranks(work, world_size)):
        assert kind == ("RankFailed" if rank == faulty else "PeerFailed")
        assert f"rank {faulty} failed at step 2: IndexError: class 12 of 10 in validation_step at" in text
