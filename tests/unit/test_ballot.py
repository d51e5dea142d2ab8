"""The ballot's arithmetic: what fp32 averages over ranks can carry exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain.ballot import BallotBox, Outcome, Vote, exact_bits, fingerprint, fits_in_gradients
from safetrain.errors import CommunicationError


def average(words_of_ranks: list[list[float]]) -> list[float]:
    """As DDP does it: each rank multiplies by 1/world in fp32, then the products are added in fp32, in some order."""
    world_size = len(words_of_ranks)
    scaled = np.array(words_of_ranks, dtype=np.float32) * np.float32(1.0 / world_size)
    order = random.Random(world_size).sample(range(world_size), world_size)
    total = np.zeros(scaled.shape[1], dtype=np.float32)
    for rank in order:
        total += scaled[rank]
    return [float(value) for value in total]


def tally(votes: list[Vote]):  # type: ignore[no-untyped-def]
    world_size = len(votes)
    boxes = [BallotBox(rank, world_size, bits=exact_bits(world_size)) for rank in range(world_size)]
    return boxes[0].decode(average([box.encode(vote) for box, vote in zip(boxes, votes, strict=True)]))


WORLDS = [world for world in range(1, 1025) if fits_in_gradients(world)]


@settings(max_examples=150, deadline=None)
@given(world_size=st.sampled_from(WORLDS), seed=st.integers(0, 2**32))
def test_every_sum_is_exact_for_any_world_size(world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    votes = [
        Vote(
            step=seed,
            applied_steps=7,
            outcome=rng.choice(list(Outcome)),
            weight=rng.choice([0, 1, 31, 2**20 + 1, 2**38 - 1, rng.randrange(2**38)]),
            more_data=rng.random() < 0.5,
            stop=rng.random() < 0.1,
            relayout=rng.random() < 0.1,
            completed=rng.random() < 0.5,
            unused_changed=rng.random() < 0.5,
        )
        for _ in range(world_size)
    ]
    result = tally(votes)
    assert result.weight == sum(vote.weight for vote in votes)
    assert result.no_data == sum(vote.outcome is Outcome.NO_DATA for vote in votes)
    assert result.skip == sum(vote.outcome is Outcome.SKIP for vote in votes)
    assert result.out_of_memory == sum(vote.outcome is Outcome.OUT_OF_MEMORY for vote in votes)
    assert result.failed == sum(vote.outcome is Outcome.FAILED for vote in votes)
    for name in ("more_data", "stop", "relayout", "completed", "unused_changed"):
        assert getattr(result, name) == sum(getattr(vote, name) for vote in votes), name
    assert result.same_step
    assert result.same_applied_steps


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 33, 100, 128, 512, 1024])
def test_the_widest_words_of_all_ranks_add_up(world_size: int) -> None:
    if not fits_in_gradients(world_size):
        pytest.skip("votes go through the control group at this size")
    widest = float(2 ** exact_bits(world_size) - 1)
    (total,) = average([[widest]] * world_size)
    assert abs(total * world_size - widest * world_size) < 0.25


def test_which_worlds_vote_in_the_gradients() -> None:
    """Every world up to 127, and powers of two far beyond; the others have a group of their own."""
    assert [world for world in range(1, 128) if not fits_in_gradients(world)] == []
    assert all(fits_in_gradients(2**power) for power in range(12))
    assert not fits_in_gradients(1000)


@settings(max_examples=100, deadline=None)
@given(world_size=st.sampled_from([2, 3, 4, 7, 64]), odd=st.integers(0, 63), difference=st.integers(1, 255))
def test_one_rank_with_another_value_is_seen(world_size: int, odd: int, difference: int) -> None:
    votes = [Vote(step=1000, applied_steps=990, log_keys=5) for _ in range(world_size)]
    votes[odd % world_size].applied_steps += difference
    result = tally(votes)
    assert result.same_step
    assert result.same_log_keys
    assert not result.same_applied_steps


@pytest.mark.parametrize("rank", [0, 3])
def test_the_one_troubled_rank_is_named(rank: int) -> None:
    votes = [Vote(step=1, outcome=Outcome.OK, weight=1) for _ in range(4)]
    assert tally(votes).troubled_rank is None
    votes[rank].outcome = Outcome.OUT_OF_MEMORY
    assert tally(votes).troubled_rank == rank
    votes[(rank + 1) % 4].outcome = Outcome.SKIP
    assert tally(votes).troubled_rank is None


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_an_unreduced_ballot_is_never_decoded(world_size: int) -> None:
    """A rank that reads its own words back (its bucket was never reduced) must not take them for a decision."""
    for rank in range(world_size):
        box = BallotBox(rank, world_size, bits=exact_bits(world_size))
        with pytest.raises(CommunicationError, match=f"damaged on rank {rank}"):
            box.decode(box.encode(Vote(step=3, outcome=Outcome.OK, weight=8)))


@pytest.mark.parametrize("foreign", [0.0, 1.0, float("nan"), float("inf"), 0.3])
def test_a_foreign_sum_is_never_decoded(foreign: float) -> None:
    box = BallotBox(0, 2, bits=exact_bits(2))
    with pytest.raises(CommunicationError, match="another collective was paired with it"):
        box.decode([foreign] * box.words)


def test_fingerprints_tell_names_apart() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint(["loss"]) == fingerprint(["loss"])
