"""What is left of an epoch's order after ranks have taken a part of it, so that other ranks can share out the rest.

While ``n`` takers take turns over an order, item number ``i`` belongs to taker ``i % n``. A leg says how many items
each taker had when the run was cut. The next run, with another number of ranks or another batch size, begins at what
the leg leaves; cut again, it leaves a leg of its own over that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Leg = Sequence[int]
"""Items taken, by taker."""


def left_of(items: Iterator[T], legs: Sequence[Leg]) -> Iterator[T]:
    """The items that none of ``legs``, each over what the one before it left, has taken; in their order."""
    for leg in legs:
        items = _Left(items, leg)
    return items


class _Left(Iterator[T]):
    """No generator: that would be at its end after an error of ``items``."""

    def __init__(self, items: Iterator[T], leg: Leg) -> None:
        self._items, self._leg = items, leg
        self._position = 0

    def __next__(self) -> T:
        while True:
            item = next(self._items)
            turn, taker = divmod(self._position, len(self._leg))
            self._position += 1
            if turn >= self._leg[taker]:
                return item
