"""What is asked of a dataset for one batch: the keys that a message names when something is wrong with it."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from safetrain.words import names_in_words


class Work(NamedTuple):
    """One batch of a rank: number ``number`` of its share of ``epoch``, both from 0.

    ``keys`` is a list, or one key where the loader does not batch. A stream is not asked for any: there it is the range
    of the batch in what this rank gets of it, or None where several loader processes read it.
    """

    epoch: int
    number: int
    keys: Any

    @property
    def samples(self) -> list[int | str]:
        """The keys as plain values; empty for a stream."""
        if self.keys is None or isinstance(self.keys, range):
            return []
        return [_plain(key) for key in (self.keys if isinstance(self.keys, (list, tuple)) else [self.keys])]

    def in_words(self) -> str:
        batch = f"batch {self.number + 1} of epoch {self.epoch + 1}"
        if self.keys is None:
            return f"{batch} of its part of the stream"
        if isinstance(self.keys, range):
            return f"samples {self.keys.start} to {self.keys.stop - 1} of its part of the stream ({batch})"
        named = list(map(str, self.samples))
        return f"sample{'' if len(named) == 1 else 's'} {names_in_words(named)} of the dataset ({batch})"


def _plain(key: Any) -> int | str:
    try:
        return operator.index(key)  # also of numpy's integers, and of tensors
    except TypeError:
        return repr(key)
