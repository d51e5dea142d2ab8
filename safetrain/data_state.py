"""Where a rank stands in its data, as a part of a run's state: to go on with exactly the batches that are left.

With the same number of ranks and the same batches each rank goes on with its own share, to the bit. Where they differ,
the samples that none has taken yet are shared out anew, so that the epoch still has each sample once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safetrain.errors import CheckpointError
from safetrain.feed import Feed, Position, Sharing


class FeedState:
    """The state of one rank's feed; ``inside_epoch`` says whether an epoch has begun that is not over."""

    def __init__(self, feed: Feed, rank: int, inside_epoch: Callable[[], bool]) -> None:
        self._feed, self._rank, self._inside_epoch = feed, rank, inside_epoch

    def state_dict(self) -> dict[str, Any]:
        inside = self._inside_epoch()
        return {
            "position": self._feed.position._asdict() if inside else None,
            "memory": self._feed.memory(at_start=inside),
            "sharing": self._feed.sharing._asdict(),
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], world_size: int) -> None:
        mine = states[self._rank % len(states)]
        if len(mine["memory"]) != len(self._feed.memory()):
            raise CheckpointError("the loader's samplers are not those of the checkpoint: build the same ones")
        self._feed.restore_memory(mine["memory"])
        if mine["position"] is None:
            return
        then, now = Sharing(**mine["sharing"]), self._feed.sharing
        position = Position(**mine["position"])
        _check_same_order(then, now, position.epoch)
        if (then.takers, then.items_per_batch, len(states)) != (now.takers, now.items_per_batch, world_size):
            position = _share_out_anew(position, then, now, [state["position"]["batches"] for state in states])
        self._feed.resume_at(position)


def _check_same_order(then: Sharing, now: Sharing, epoch: int) -> None:
    """What ranks had taken of one order says nothing about another one."""
    keys = {"seed": "seed", "shuffled": "loader.shuffle", "samples": "the training dataset's number of samples"}
    for name, what in keys.items():
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            raise CheckpointError(
                f"the checkpoint stands inside epoch {epoch}, whose order of samples came from {what} = {before}; here "
                f"it is {after}, so what is left of the epoch can't be known. Set it as it was, or take a checkpoint "
                "from between two epochs."
            )


def _share_out_anew(position: Position, then: Sharing, now: Sharing, batches: Sequence[int]) -> Position:
    """The start of what is left; all ranks call it with the same ``batches``, by rank of the run that saved."""
    if not (then.countable and now.countable):
        raise CheckpointError(
            f"the checkpoint stands inside epoch {position.epoch}, shared out over {then.takers} takers in batches of "
            f"{then.items_per_batch}; here they are {now.takers}, in batches of {now.items_per_batch}. Which samples "
            "are left can't be known where the dataset or a sampler splits over ranks by itself, or several loader "
            "workers of a rank read a stream. Use as many ranks and workers, and the batch size, of the run that saved."
        )
    leg = [count * then.items_per_batch for count in batches]
    return Position(position.epoch, 0, (*position.legs, leg))
