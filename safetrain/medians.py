"""Medians of times that were measured in turns, and how sure one may be of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, from the order alone: it takes 6 values, fewer give all they span."""
    ordered, count = sorted(values), len(values)
    tail, below = 0.0, 0
    while (tail := tail + math.comb(count, below) / 2**count) <= 0.025:
        below += 1
    below = max(0, below - 1)
    return ordered[below], ordered[count - 1 - below]
