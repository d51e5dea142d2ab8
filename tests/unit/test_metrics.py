"""Metrics over ranks: exact, the same on every rank, whatever the order and the spread of samples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safetrain.errors import DataError, UsageError
from safetrain.metrics import MetricLog, exact_sum, in_dataset_order


class Together:
    """Stands in for a rank's ``Comm``: all ranks' parts are known beforehand."""

    def __init__(self, logs: Sequence[MetricLog]) -> None:
        self.parts = [_record(log, "gather") for log in logs]
        self.vectors = [_record(log, "sum_vector") for log in logs]

    def gather(self, value: Any) -> list[Any]:
        return self.parts

    def sum_vector(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self.vectors, strict=True)]


class _RecordedError(Exception):
    pass


def _record(log: MetricLog, kind: str) -> Any:
    class Recorder:
        def gather(self, value: Any) -> Any:
            raise _RecordedError(value if kind == "gather" else None)

        def sum_vector(self, values: Sequence[float]) -> Any:
            raise _RecordedError(list(values))

    try:
        (log.reduce if kind == "gather" else log.sum_fast)(Recorder())
    except _RecordedError as recorded:
        return recorded.args[0]
    raise AssertionError("no collective was called")


def logs_of(*fills: Callable[[MetricLog], None]) -> list[MetricLog]:
    logs = []
    for fill in fills:
        logs.append(MetricLog())
        fill(logs[-1])
    return logs


def reduce(*fills: Callable[[MetricLog], None]) -> dict[str, float]:
    logs = logs_of(*fills)
    return logs[0].reduce(Together(logs))


class TestExactSum:
    @given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e300, max_value=1e300)))
    def test_the_terms_add_up_without_rounding(self, values: list[float]) -> None:
        assert sum(map(Fraction, exact_sum(values))) == sum(map(Fraction, values))

    @given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.integers(1, 5), st.randoms())
    def test_merged_parts_give_the_sum_of_the_whole_in_any_order(
        self, values: list[float], parts: int, shuffler: random.Random
    ) -> None:
        shuffled = shuffler.sample(values, len(values))
        terms = [term for part in range(parts) for term in exact_sum(shuffled[part::parts])]
        assert math.fsum(terms) == math.fsum(values)

    def test_what_is_not_finite_stays_so(self) -> None:
        assert exact_sum([1.0, math.inf]) == [math.inf]
        assert math.isnan(exact_sum([math.inf, -math.inf])[0])
        assert math.isnan(exact_sum([1.0, math.nan])[0])
        assert exact_sum([1e308, 1e308]) == [math.inf]
        assert exact_sum([]) == exact_sum([1.0, -1.0]) == []


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_metric_of_25_samples_is_that_of_one_process_to_the_last_digit(
    world_size: int, batch_size: int, dtype: torch.dtype
) -> None:
    values = (torch.randn(25, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e3).to(dtype)

    def fill(rank: int) -> Callable[[MetricLog], None]:
        def add(log: MetricLog) -> None:
            for batch in values[rank::world_size].split(batch_size):
                log.add("loss", batch)
                log.add("total", batch, how="sum")
                log.add("least", batch, how="min")
                log.add("largest", batch.amax(), how="max")

        return add

    doubles = values.double().tolist()
    assert reduce(*map(fill, range(world_size))) == {
        "largest": max(doubles),
        "least": min(doubles),
        "loss": math.fsum(doubles) / 25,
        "total": math.fsum(doubles),
    }


def test_h62_each_sample_is_counted_once() -> None:
    def fill(rank: int) -> Callable[[MetricLog], None]:
        return lambda log: log.add("count", torch.ones(len(range(rank, 21, 2))), how="sum")

    assert reduce(fill(0), fill(1)) == {"count": 21}


def test_h96_no_average_of_averages() -> None:
    def nine_right(log: MetricLog) -> None:
        log.add("accuracy", 1.0, weight=9)
        log.add("accuracy_by_sample", torch.ones(9))
        log.batch_weight = 9
        log.add("accuracy_of_batch", torch.tensor(1.0))
        for name, count in {"true_positive": 9, "false_positive": 0, "false_negative": 0}.items():
            log.add(name, count, how="sum")

    def one_wrong(log: MetricLog) -> None:
        log.add("accuracy", 0.0, weight=1)
        log.add("accuracy_by_sample", torch.zeros(1))
        log.add("accuracy_of_batch", torch.tensor(0.0))
        for name, count in {"true_positive": 0, "false_positive": 0, "false_negative": 1}.items():
            log.add(name, count, how="sum")

    for ranks in ((nine_right, one_wrong), (one_wrong, nine_right)):
        metrics = reduce(*ranks)
        assert metrics["accuracy"] == metrics["accuracy_by_sample"] == metrics["accuracy_of_batch"] == 0.9
        right, wrong = metrics["true_positive"], metrics["false_positive"] + metrics["false_negative"]
        assert 2 * right / (2 * right + wrong) == 18 / 19  # F1; the ranks' own are 1 and 0


def test_names_need_not_be_on_every_rank() -> None:
    def both(log: MetricLog) -> None:
        log.add("seldom", 6.0)
        log.add("peak", 1, how="max")

    metrics = reduce(lambda log: None, lambda log: log.add("seldom", 3.0, weight=2), both)
    assert metrics == {"peak": 1.0, "seldom": 4.0}
    assert list(metrics) == ["peak", "seldom"]
    assert reduce(lambda log: None, lambda log: None) == {}


def test_without_samples_a_mean_is_nan_and_a_sum_is_0() -> None:
    def fill(log: MetricLog) -> None:
        log.add("mean", torch.zeros(0))
        log.add("weightless", 5.0, weight=0)
        log.add("sum", torch.zeros(0), how="sum")
        log.add("max", torch.zeros(0), how="max")

    metrics = reduce(fill, fill)
    assert metrics.pop("sum") == 0
    assert all(map(math.isnan, metrics.values()))
    assert sorted(metrics) == ["max", "mean", "weightless"]


@pytest.mark.parametrize("how", ["mean", "sum", "min", "max"])
def test_nan_on_one_rank_is_nan_for_all(how: Any) -> None:
    for values in ((math.nan, 1.0), (1.0, math.nan)):
        metrics = reduce(*(lambda log, value=value: log.add("x", value, how=how) for value in values))
        assert math.isnan(metrics["x"])


def test_kinds_of_numbers_may_mix() -> None:
    def fill(log: MetricLog) -> None:
        for value in (1, 2.5, True, torch.tensor(3), torch.tensor([4, 5]), torch.tensor(2.0), torch.tensor(False)):
            log.add("x", value, how="sum")

    assert reduce(fill) == {"x": 18.5}


def test_what_was_logged_does_not_change_with_the_tensor() -> None:
    running = torch.tensor(1.0, requires_grad=True)
    log = MetricLog()
    log.add("x", running)
    with torch.no_grad():
        running.add_(100)
    assert log.reduce(Together([log])) == {"x": 1.0}


def test_names_signature_and_clear() -> None:
    log = MetricLog()
    log.add("b", 1.0)
    log.add("a", 1.0, how="max")
    assert (log.names(), log.signature()) == (("a", "b"), ("a:max", "b:mean"))
    log.clear()
    assert log.names() == ()
    log.add("a", 1.0, how="sum")


class TestSumFast:
    def test_it_is_one_vector_of_sums_and_weights(self) -> None:
        def first(log: MetricLog) -> None:
            log.add("loss", 1.0, weight=3)
            log.add("n", 2, how="sum")

        def second(log: MetricLog) -> None:
            log.add("n", 5, how="sum")
            log.add("loss", 2.0, weight=1)

        logs = logs_of(first, second)
        assert Together(logs).vectors == [[3.0, 3.0, 2.0, 1.0], [2.0, 1.0, 5.0, 1.0]]
        assert [log.sum_fast(Together(logs)) for log in logs] == [({"loss": 1.25, "n": 7.0}, [])] * 2

    def test_a_maximum_takes_the_other_way(self) -> None:
        logs = logs_of(lambda log: log.add("x", 1.0, how="max"), lambda log: log.add("x", 3.0, how="max"))
        assert logs[0].sum_fast(Together(logs)) == ({"x": 3.0}, [])


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"value": 1.0, "how": "median"}, "allowed are mean, sum, min, max"),
            ({"value": torch.zeros(2, 3)}, r"torch.float32 of shape \(2, 3\)"),
            ({"value": torch.tensor(1j)}, "torch.complex64"),
            ({"value": 1.0, "weight": -1}, "a weight, 0 or more"),
            ({"value": torch.zeros(3), "weight": 3}, "a scalar that is a mean"),
            ({"value": 1.0, "weight": 3, "how": "sum"}, "a scalar that is a mean"),
        ],
    )
    def test_what_has_no_meaning(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            MetricLog().add("x", **arguments)

    def test_one_name_in_two_ways(self) -> None:
        log = MetricLog()
        log.add("x", 1.0)
        with pytest.raises(UsageError, match="how='mean' came before"):
            log.add("x", 1.0, how="sum")

    def test_one_name_in_two_ways_on_two_ranks_is_told_to_both(self) -> None:
        logs = logs_of(lambda log: log.add("x", 1.0), lambda log: log.add("x", 1.0, how="sum"))
        for log in logs:
            with pytest.raises(UsageError, match="how=mean on some ranks, how=sum on others"):
                log.reduce(Together(logs))


class TestInDatasetOrder:
    @pytest.mark.parametrize("world_size", [1, 2, 4, 7])
    @pytest.mark.parametrize("samples", [0, 1, 13, 28])
    def test_h63_the_tail_is_kept(self, samples: int, world_size: int) -> None:
        parts = [list(range(rank, samples, world_size)) for rank in range(world_size)]
        assert in_dataset_order(parts) == list(range(samples))

    @pytest.mark.parametrize("lengths", [[4, 3, 3, 4], [4, 3, 2, 3], [0, 3, 3, 3], [5, 3, 3, 3]])
    def test_h63_missing_results_are_an_error_with_the_numbers(self, lengths: list[int]) -> None:
        with pytest.raises(DataError, match=rf"the ranks gave \[{', '.join(map(str, lengths))}\] results"):
            in_dataset_order([[0] * length for length in lengths])


def test_what_came_since_can_be_forgotten() -> None:
    log = MetricLog()
    log.add("loss", 1.0, weight=2)
    before, lengths = log.state_dict(), log.lengths()
    log.add("loss", 5.0)
    log.add("new", torch.ones(3))
    log.truncate(lengths)
    assert log.state_dict() == before
    log.add("new", 1, how="sum")  # a name that is new again
