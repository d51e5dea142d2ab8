"""Who is slower than the others, in what, and when that is worth a word."""

from __future__ import annotations

import pytest

from safetrain.stragglers import StragglerWatch, slowest

USUAL = {"data": 0.001, "forward": 0.010, "backward": 0.020}


def slow_in(part: str, by_s: float) -> dict[str, float]:
    return {**USUAL, part: USUAL[part] + by_s}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("part", ["data", "forward", "backward"])
def test_the_slow_rank_and_its_part_are_named(ranks: int, part: str) -> None:
    for rank in (0, ranks - 1):
        found = slowest([slow_in(part, 0.030) if rank == other else USUAL for other in range(ranks)])
        assert found is not None
        assert (found.rank, found.slow_part) == (rank, part)
        assert f"rank {rank} is slower" in str(found)
        assert "its own work takes 61.0 ms a step, theirs 31.0 ms" in str(found)
        assert f"{part}: {1000 * (USUAL[part] + 0.030):.1f} ms against {1000 * USUAL[part]:.1f} ms" in str(found)


@pytest.mark.parametrize(
    "work",
    [
        [USUAL],
        [USUAL, USUAL],
        [USUAL, slow_in("forward", 0.007)],  # 23 %
        [{"data": 0.0, "forward": 0.001}, {"data": 0.0, "forward": 0.0029}],  # 190 %, but 1.9 ms
    ],
)
def test_small_differences_are_not_worth_a_word(work: list[dict[str, float]]) -> None:
    assert slowest(work) is None


def test_it_takes_three_intervals_in_a_row_and_is_said_once() -> None:
    watch, slow = StragglerWatch(), [USUAL, slow_in("data", 0.1)]
    assert [watch.judge(work, 10) is not None for work in (slow, slow, [USUAL, USUAL], slow, slow)] == [False] * 5
    assert watch.judge(slow, 10) is not None
    assert watch.judge(slow, 10) is None
    other = [slow_in("data", 0.1), USUAL]
    assert [watch.judge(other, 10) is not None for _ in range(3)] == [False, False, True]
    assert [watch.judge(work, 10) is not None for work in (other, [USUAL, USUAL], other, other, other)][-1]


@pytest.mark.parametrize(
    ("by_s", "intervals"),
    [
        (0.010, 25),  # 41 ms a step against 31: after 10 s
        (0.069, 3),  # 100 ms, which is more than twice as much: after 2 s
    ],
)
def test_what_is_a_little_slower_is_watched_for_longer(by_s: float, intervals: int) -> None:
    """A rank can be the slower one for the first seconds because others use its machine."""
    watch, slow = StragglerWatch(), [USUAL, slow_in("forward", by_s)]
    told = [watch.judge(slow, 10) is not None for _ in range(60)]
    assert told.index(True) + 1 == intervals
    assert sum(told) == 1
    assert [watch.judge([USUAL, USUAL], 10), *(watch.judge(slow, 10) for _ in range(2))] == [None] * 3


def test_short_steps_that_are_far_slower_are_not_told_within_two_seconds() -> None:
    watch, slow = StragglerWatch(), [{"forward": 0.001}, {"forward": 0.010}]
    assert [watch.judge(slow, 10) is not None for _ in range(25)].index(True) == 19
