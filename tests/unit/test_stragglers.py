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
    assert [watch.judge(work) is not None for work in (slow, slow, [USUAL, USUAL], slow, slow)] == [False] * 5
    assert watch.judge(slow) is not None
    assert watch.judge(slow) is None
    other = [slow_in("data", 0.1), USUAL]
    assert [watch.judge(other) is not None for _ in range(3)] == [False, False, True]
    assert [watch.judge(work) is not None for work in (other, [USUAL, USUAL], other, other, other)][-1]
