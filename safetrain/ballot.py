"""Idea 3, agree: what a rank says once per optimizer step, and what all ranks read from the sum.

A vote is a handful of small integers. They travel as fp32 words in the gradient of a parameter, so they are *averaged*
by DDP (multiplied by 1/world, then summed); ``BallotBox`` knows how many bits of a word survive that exactly:

- world a power of two: scaling is exact, and the sum is while it stays below 2**24;
- else every term and every addition rounds by at most 2**-24, so the bound on the total error must stay below 1/4.

Larger numbers are split into limbs of that width. A value x is equal on all n ranks exactly when n * sum(x²) == (sum
x)².
"""

from __future__ import annotations

import enum
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import ClassVar, NamedTuple

from safetrain.errors import CommunicationError

_MANTISSA_BITS = 24
_WEIGHT_BITS = 44  # 1.7e13 tokens a step
_SIGNATURE = 5  # cast by rank 0 only: an unreduced or foreign word can't look like it


class Outcome(enum.IntEnum):
    """How a rank's share of a window went; the larger, the graver."""

    NO_DATA = 0
    OK = 1
    SKIP = 2
    OUT_OF_MEMORY = 3
    FAILED = 4


@dataclass(slots=True)
class Vote:
    """What one rank says about one window."""

    step: int
    applied_steps: int = 0
    outcome: Outcome = Outcome.NO_DATA
    weight: int = 0  # samples, or tokens, that its gradients stand for
    more_data: bool = True
    stop: bool = False
    save: bool = False  # it wants a checkpoint after the next window
    leave: bool = False  # it was told to leave, once there is one
    relayout: bool = False  # its parameters are no longer those that DDP was built for
    completed: bool = False  # some parameter got no gradient from its own batches
    unused_changed: bool = False  # ... and not the same ones as when the ranks last compared them
    log_keys: int = 0  # fingerprint of the names it logs
    collectives: int = 0  # its share of a number that is 0 over all ranks when they issued the same collectives


class Tally(NamedTuple):
    """The sum over ranks: the same on all of them. Counts are numbers of ranks."""

    world_size: int
    weight: int
    no_data: int
    skip: int
    out_of_memory: int
    failed: int
    more_data: int
    stop: int
    save: int
    leave: int
    relayout: int
    completed: int
    unused_changed: int
    troubled_rank: int | None  # the one rank that asked to skip, ran out of memory or failed; None: none, or several
    same_step: bool
    same_applied_steps: bool
    same_log_keys: bool
    same_collectives: bool = True

    @property
    def fell_apart(self) -> bool:
        """Whether a rank failed, or changed what its model trains while others did not."""
        return self.failed > 0 or 0 < self.relayout < self.world_size


def exact_bits(world_size: int) -> int:
    """How many bits a word may have on each rank so that its fp32 average still gives the exact sum."""
    if world_size & (world_size - 1) == 0:
        return _MANTISSA_BITS - (world_size.bit_length() - 1)
    # (world + 2) roundings of at most 2**-24, on a total of at most world * 2**bits, must stay below 1/4
    return (2 ** (_MANTISSA_BITS - 2) // (world_size * (world_size + 2))).bit_length() - 1


def fits_in_gradients(world_size: int) -> bool:
    """Whether fp32 words are wide enough for this many ranks; else the vote needs integers of its own."""
    return exact_bits(world_size) >= max(8, world_size.bit_length())


def fingerprint(names: Sequence[str]) -> int:
    """A number for a sequence of names, the same in every process."""
    return zlib.crc32("\0".join(names).encode())


class BallotBox:
    """Encodes one rank's vote into words, and decodes the words summed over ranks."""

    _COUNTS: ClassVar = ("more_data", "stop", "save", "leave", "relayout", "completed", "unused_changed")
    _COMPARED: ClassVar = ("step", "applied_steps", "log_keys")

    def __init__(self, rank: int, world_size: int, *, bits: int) -> None:
        self._rank, self._world_size, self._bits = rank, world_size, bits
        self._limbs = -(-_WEIGHT_BITS // bits)
        # x² must fit into a word too
        self._compared_mask = (1 << min(8, bits // 2)) - 1
        self.words = 2 + len(Outcome) - 2 + 1 + 1 + len(self._COUNTS) + self._limbs + 2 * len(self._COMPARED) + 1

    def encode(self, vote: Vote) -> list[int]:
        """This rank's words, each at most ``bits`` wide."""
        outcome = vote.outcome
        words: list[int] = [
            1,
            _SIGNATURE if self._rank == 0 else 0,
            outcome is Outcome.NO_DATA,
            outcome is Outcome.SKIP,
            outcome is Outcome.OUT_OF_MEMORY,
            outcome is Outcome.FAILED,
            self._rank if outcome >= Outcome.SKIP else 0,
            vote.more_data,
            vote.stop,
            vote.save,
            vote.leave,
            vote.relayout,
            vote.completed,
            vote.unused_changed,
        ]
        mask = (1 << self._bits) - 1
        words.extend(vote.weight >> (self._bits * limb) & mask for limb in range(self._limbs))
        for value in (vote.step, vote.applied_steps, vote.log_keys):
            small = value & self._compared_mask
            words += (small, small * small)
        words.append(vote.collectives & mask)
        return words

    def decode(self, averages: Sequence[float]) -> Tally:
        """The tally in words *averaged* over ranks.

        Raises:
            CommunicationError: the words are not such an average; nothing may be decided from them.
        """
        world_size = self._world_size
        sums = [average * world_size for average in averages]
        words = list(map(round, sums)) if all(map(math.isfinite, sums)) else [-1, -1]
        possible = words[:2] == [world_size, _SIGNATURE] and min(words) >= 0 and max(words) <= world_size << self._bits
        if not possible or max(map(abs, map(sub, sums, words))) > 0.25:
            raise CommunicationError(
                f"the vote of this step came back damaged on rank {self._rank}: the gradient reduction did not "
                "finish, or another collective was paired with it. Look for a collective issued by user code on one "
                "rank only, and for a model that was moved, converted or re-registered inside the step."
            )
        no_data, skip, out_of_memory, failed, rank_sum = words[2:7]
        more_data, stop, save, leave, relayout, completed, unused_changed = words[7:14]
        limbs = words[14 : 14 + self._limbs]
        compared = words[14 + self._limbs : -1]
        same = [
            world_size * squares == total * total for total, squares in zip(compared[::2], compared[1::2], strict=True)
        ]
        return Tally(
            world_size=world_size,
            weight=sum(limb << (self._bits * index) for index, limb in enumerate(limbs)),
            no_data=no_data,
            skip=skip,
            out_of_memory=out_of_memory,
            failed=failed,
            more_data=more_data,
            stop=stop,
            save=save,
            leave=leave,
            relayout=relayout,
            completed=completed,
            unused_changed=unused_changed,
            troubled_rank=rank_sum if skip + out_of_memory + failed == 1 else None,
            same_step=same[0],
            same_applied_steps=same[1],
            same_log_keys=same[2],
            same_collectives=words[-1] % (1 << self._bits) == 0,
        )
