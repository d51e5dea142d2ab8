"""Where this rank was when its window was opened: what a window that fails must leave no trace in, so that the state
which is left is that of the last whole step, to the bit.

Weights and optimizers are not touched before the vote, and buffers are kept by the reduction. This is the rest: the
place in the data, the generators, and what was logged. To note it costs 10 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from safetrain.feed import Feed, Mark
from safetrain.metrics import MetricLog
from safetrain.seeding import GeneratorNote, GeneratorNotes


@dataclass(frozen=True, slots=True)
class _Noted:
    place: Mark
    random: GeneratorNote
    logged: Mapping[str, int]


class Opening:
    """One rank's; noted for each window, and only where ``feed.remembers``."""

    def __init__(self, feed: Feed, log: Callable[[], MetricLog], device: torch.device) -> None:
        self._feed, self._log, self._device = feed, log, device
        self._notes = GeneratorNotes(device)
        self._noted: _Noted | None = None

    def note(self) -> None:
        """A window, or a validation, begins."""
        if self._feed.remembers:
            self._noted = _Noted(self._feed.mark(), self._notes.take(), self._log().lengths())

    def forget(self) -> None:
        """It is over, and went well."""
        self._noted = None

    def go_back(self) -> None:
        """To where it began, if one is under way: for the state only, no batch comes again in this process."""
        if self._noted is None:
            return
        self._feed.go_back(self._noted.place)
        self._noted.random.restore(self._device)
        self._log().truncate(self._noted.logged)
