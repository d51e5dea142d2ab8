"""The limit of DDP's buckets: as asked, or just enough more that the last one has room for the ballot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetrain.buckets import cap_with_room

MIB = 1 << 20


def buckets_of(sizes: Sequence[int], cap_mb: float | None) -> list[list[int]]:
    """As torch's reducer forms them."""
    limits = [MIB, 25 * MIB] if cap_mb is None else [int(cap_mb * MIB)]
    formed: list[list[int]] = [[]]
    for size in sizes:
        formed[-1].append(size)
        if sum(formed[-1]) >= limits[min(len(formed) - 1, len(limits) - 1)]:
            formed.append([])
    return formed if formed[-1] else formed[:-1]


@pytest.mark.parametrize("sizes", [[100, 200], [MIB, 5], [MIB, 20 * MIB, 4 * MIB], []])
def test_torchs_own_limits_stay_where_the_last_bucket_is_open(sizes: list[int]) -> None:
    assert cap_with_room(sizes, None) is None


def test_a_cap_that_was_asked_for_stays_where_the_last_bucket_is_open() -> None:
    assert cap_with_room([600, 600, 10], 0.001) == 0.001


def test_an_mlp_of_a_little_over_one_mib_is_one_bucket_with_the_ballot_in_it() -> None:
    sizes = [262144, 1024] * 4 + [10240, 40]
    assert len(buckets_of([*sizes[::-1], 92], None)) == 2
    assert len(buckets_of([*sizes[::-1], 92], cap_with_room(sizes[::-1], None))) == 1


@given(
    st.lists(st.integers(1, 60_000_000), min_size=1, max_size=30),
    st.one_of(st.none(), st.floats(1e-6, 60.0)),
)
def test_the_ballot_is_never_alone(sizes: list[int], cap_mb: float | None) -> None:
    chosen = cap_with_room(sizes, cap_mb)
    assert len(buckets_of([*sizes, 92], chosen)[-1]) > 1
    if len(buckets_of([*sizes, 92], cap_mb)[-1]) > 1:
        assert chosen == cap_mb
