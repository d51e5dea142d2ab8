"""The best value of a validation metric so far: it tells which checkpoint is worth keeping."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

logger = logging.getLogger("safetrain")


class BestMetric:
    """Follows one metric.

    Attributes:
        value: the best so far; NaN before the first.
    """

    def __init__(self, name: str | None, mode: str) -> None:
        self._name, self._mode = name, mode
        self.value = math.nan

    def judge(self, validation: Mapping[str, float]) -> float | None:
        """The metric's value in the metrics of a validation; None: it is not there."""
        if self._name is None or not validation:
            return None
        if self._name not in validation:
            logged = ", ".join(sorted(validation))
            logger.warning("checkpoint.metric=%s: validation did not log it. Logged: %s.", self._name, logged)
            return None
        value = validation[self._name]
        better = value > self.value if self._mode == "max" else value < self.value
        if better or math.isnan(self.value):
            self.value = value
        return value

    def state_dict(self) -> float:
        return self.value

    def load_state_dict(self, state: float) -> None:
        self.value = state
