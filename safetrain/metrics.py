"""Metrics over ranks, exactly: what one process would compute on all samples, to the last digit.

Floating-point sums depend on their order, and an average of averages is wrong where ranks or batches differ in size.
So a mean is kept as a sum and a weight, and a sum as the few doubles that add up to it without rounding
(``exact_sum``), rounded once, when all ranks' parts are together. Log F1 and its like by their counts (``how="sum"``).

What is exact is the sum of the values as given: one value a sample gives the same result however samples are spread
over batches and ranks; the mean of a batch carries the rounding of the batch's own arithmetic.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch

from safetrain.errors import DataError, UsageError

T = TypeVar("T")
How = Literal["mean", "sum", "min", "max"]
_HOWS = get_args(How)


class Ranks(Protocol):
    """What ``MetricLog`` needs of a ``Comm``."""

    def gather(self, value: T, /) -> list[T]: ...
    def sum_vector(self, values: Sequence[float], /) -> list[float]: ...


@dataclass
class _Entries:
    """All that was logged under one name: scalars, and tensors of one value a sample, each with its weight."""

    how: How
    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """One rank's part of a metric. ``terms``: an exact sum; for min and max the one value, if any."""

    how: How
    terms: list[float]
    weight: int


class MetricLog:
    """Collects metrics on one rank; ``reduce`` makes them one over all ranks.

    Attributes:
        batch_weight: weight of a scalar mean logged without one; the loop sets it to the samples of the batch at hand.
        paused: check what is logged, and forget it.
    """

    def __init__(self) -> None:
        self.batch_weight = 1
        self.paused = False
        self._entries: dict[str, _Entries] = {}

    def add(self, name: str, value: float | torch.Tensor, weight: int | None = None, how: How = "mean") -> None:
        """Log a number, a scalar tensor or a 1-D tensor of one value a sample, without waiting for the device.

        ``weight``: samples (or tokens) that a scalar mean stands for, by default ``batch_weight``. That of a 1-D tensor
        is its length.

        Raises:
            UsageError: a ``how`` that is unknown or not the name's, a weight without a meaning, a wrong shape.
        """
        if how not in _HOWS:
            raise UsageError(f"log({name!r}, how={how!r}): allowed are {', '.join(_HOWS)}")
        # A copy: the caller may go on to change its tensor in place, and a view would keep the whole batch alive.
        kept = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        if kept.dim() > 1 or kept.is_complex():
            found = f"{kept.dtype} of shape {tuple(kept.shape)}"
            raise UsageError(f"log({name!r}) got {found}: give a real number, a scalar tensor, or one value a sample")
        if weight is not None and (kept.dim() == 1 or how != "mean" or weight < 0):
            raise UsageError(
                f"log({name!r}, weight={weight}, how={how!r}): a weight, 0 or more, belongs to a scalar that is a mean"
            )
        if self.paused:
            return
        entries = self._entries.get(name)
        if entries is None:
            entries = self._entries[name] = _Entries(how)
        elif entries.how != how:
            raise UsageError(f"log({name!r}, how={how!r}): how={entries.how!r} came before; use one, or two names")
        entries.values.append(kept)
        entries.weights.append(len(kept) if kept.dim() else self.batch_weight if weight is None else weight)

    def names(self) -> tuple[str, ...]:
        """The names logged on this rank since ``clear``, sorted."""
        return tuple(sorted(self._entries))

    def signature(self) -> tuple[str, ...]:
        """Names with their ``how``, sorted: what must be equal on all ranks for ``sum_fast``."""
        return tuple(f"{name}:{self._entries[name].how}" for name in self.names())

    def clear(self) -> None:
        self._entries.clear()

    def lengths(self) -> dict[str, int]:
        """How much there is, for ``truncate``."""
        return {name: len(entries.values) for name, entries in self._entries.items()}

    def truncate(self, lengths: Mapping[str, int]) -> None:
        """Forget what has come since ``lengths()``."""
        self._entries = {name: self._entries[name] for name in lengths}
        for name, length in lengths.items():
            entries = self._entries[name]
            del entries.values[length:], entries.weights[length:]

    def state_dict(self) -> dict[str, Any]:
        return {name: (kept.how, list(kept.values), list(kept.weights)) for name, kept in self._entries.items()}

    def extend(self, state: Mapping[str, Any]) -> None:
        """Add what another log's ``state_dict()`` holds."""
        for name, (how, values, weights) in state.items():
            entries = self._entries.setdefault(name, _Entries(how))
            entries.values += values
            entries.weights += weights

    def reduce(self, comm: Ranks) -> dict[str, float]:
        """Every metric over all ranks, the same on each. All ranks call it; one that logged less, or nothing, may.

        One gather of a few numbers a metric. A mean without any weight is NaN.

        Raises:
            UsageError: on all ranks, when a name has a different ``how`` on different ranks.
        """
        parts: dict[str, list[_Part]] = defaultdict(list)
        for ranks_own in comm.gather({name: _summarise(entries) for name, entries in self._entries.items()}):
            for name, part in ranks_own.items():
                parts[name].append(part)
        return {name: _merge(name, parts[name]) for name in sorted(parts)}

    def sum_fast(self, comm: Ranks, beside: Sequence[float] = ()) -> tuple[dict[str, float], list[float]]:
        """``reduce`` in one all-reduce of doubles, for when all ranks' ``signature()`` is known to be equal; and the
        sums over ranks of the numbers ``beside`` it.

        Sums are rounded once a rank. Where a metric is a min or a max it falls back to ``reduce``.
        """
        if any(entries.how in ("min", "max") for entries in self._entries.values()):
            return self.reduce(comm), comm.sum_vector(beside) if beside else []
        names = self.names()
        parts = [_summarise(self._entries[name]) for name in names]
        own = [number for part in parts for number in (math.fsum(part.terms), float(part.weight))]
        flat = comm.sum_vector([*own, *beside])
        totals = zip(flat[: len(own) : 2], flat[1 : len(own) : 2], strict=True)
        metrics = {
            name: _mean(total, weight) if part.how == "mean" else total
            for name, part, (total, weight) in zip(names, parts, totals, strict=True)
        }
        return metrics, flat[len(own) :]


def exact_sum(values: Iterable[float]) -> list[float]:
    """Doubles that add up to the sum of ``values`` without rounding, largest first: ``math.fsum`` of them rounds once.

    Mostly one or two, the same whatever the order of ``values``. Where it is not finite: one term, inf or NaN.
    """
    given = list(values)
    terms: list[float] = []
    try:
        while (rest := math.fsum(chain(given, (-term for term in terms)))) != 0.0:
            terms.append(rest)
            if not math.isfinite(rest):
                break
    except (OverflowError, ValueError):  # beyond the largest double; inf - inf
        return [sum(given)]
    return terms


def in_dataset_order(parts: Sequence[Sequence[T]]) -> list[T]:
    """Results of an evaluation, gathered from all ranks, in the order of the dataset; none is lost at the tail.

    ``parts[r]`` holds rank r's results in the order it read its samples: r, r + ranks, r + 2 ranks, ...

    Raises:
        DataError: the parts' lengths are not those of such shares, so some rank's results are missing.
    """
    total = sum(map(len, parts))
    expected = [len(range(rank, total, len(parts))) for rank in range(len(parts))]
    if (lengths := [len(part) for part in parts]) != expected:
        raise DataError(
            f"the ranks gave {lengths} results; {total} samples would be spread as {expected}: some are missing or "
            "double. Give one result a sample, in the loader's order."
        )
    return [parts[index % len(parts)][index // len(parts)] for index in range(total)]


def _summarise(entries: _Entries) -> _Part:
    values = _to_doubles(entries.values)
    if entries.how in ("min", "max"):
        return _Part(entries.how, _extreme(chain.from_iterable(values), entries.how), 0)
    terms = (
        number * weight if entries.how == "mean" and value.dim() == 0 else number
        for numbers, value, weight in zip(values, entries.values, entries.weights, strict=True)
        for number in numbers
    )
    return _Part(entries.how, exact_sum(terms), sum(entries.weights))


def _merge(name: str, parts: list[_Part]) -> float:
    hows = sorted({part.how for part in parts})
    if len(hows) > 1:
        raise UsageError(f"log({name!r}): how={' on some ranks, how='.join(hows)} on others; use one, or two names")
    terms = chain.from_iterable(part.terms for part in parts)
    if hows[0] in ("min", "max"):
        return next(iter(_extreme(terms, hows[0])), math.nan)
    total = math.fsum(exact_sum(terms))
    return _mean(total, sum(part.weight for part in parts)) if hows[0] == "mean" else total


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def _extreme(values: Iterable[float], how: How) -> list[float]:
    """The least or the largest value in a list of one, NaN if any is; an empty list of none."""
    given = list(values)
    if any(map(math.isnan, given)):
        return [math.nan]
    return [min(given) if how == "min" else max(given)] if given else []


def _to_doubles(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """Each tensor's numbers, read with one copy from the device per kind of tensor instead of one per tensor."""
    kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        kinds[tensor.device, tensor.dtype].append(index)
    numbers: list[list[float]] = [[] for _ in tensors]
    for indices in kinds.values():
        joined = torch.cat([tensors[index].reshape(-1) for index in indices]).cpu().double().tolist()
        start = 0
        for index in indices:
            numbers[index] = joined[start : start + tensors[index].numel()]
            start += tensors[index].numel()
    return numbers
