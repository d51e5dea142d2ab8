"""What the preflight's checks are made of: a look on each rank, a judgement on what all ranks saw, findings in words.

A check looks on every rank (local, no collective, plain data out), and judges what all ranks saw (a pure function: the
same findings on every rank, and a test needs no ranks). checkup.py holds the list of checks and runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from safetrain.words import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from safetrain.comm import Comm
    from safetrain.config import Loader, Preflight
    from safetrain.feed import Feed
    from safetrain.links import Measured
    from safetrain.sample import Sample
    from safetrain.trainer import Trainer

Verdict = Literal["ok", "warn", "refuse"]
_LONGEST_VALUE = 90


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        value: what is there, in a few words.
        ranks: whom it is about; empty: all.
        words: what is wrong with it, one sentence; empty where nothing is.
        remedy: what to do about it.
    """

    check: str
    value: str
    verdict: Verdict = "ok"
    ranks: tuple[int, ...] = ()
    words: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """For people who do not see the table."""
        return f"{self.check}: {self.words} {self.remedy}".rstrip()


class Said(NamedTuple):
    """What one rank saw. ``host`` is its machine's name, told apart from others of the same name."""

    rank: int
    host: str
    facts: Any


@dataclass(frozen=True)
class Here:
    """What a check of the machine may look at.

    Attributes:
        settings: the config, flat: ``{"loop.epochs": 5, ...}``.
    """

    comm: Comm
    options: Preflight
    settings: Mapping[str, Any]
    loader: Loader
    run_dir: Path | None


@dataclass(frozen=True)
class Linked(Here):
    """What a check of the connections may look at: what all ranks have measured together."""

    measured: Measured


@dataclass(frozen=True)
class Modelled(Here):
    """What a check of the model may look at: it is on its device, and DDP has not seen it yet."""

    model: nn.Module


@dataclass(frozen=True)
class Job(Here):
    """What a check of the job may look at: everything is built, nothing has run.

    Attributes:
        token: what rank 0 has left in the run directory; known there only.
        sample: a few items of the training data, read once for all checks.
    """

    trainer: Trainer
    feed: Feed
    token: str
    sample: Sample


@dataclass(frozen=True)
class Begun(Here):
    """What a check of the first batch may look at: it is here, and still to be trained on.

    Attributes:
        seconds: how long it took.
        only_checks: no training follows.
        generators: where random, numpy and torch are.
        step: what the first step alone, forward and backward, came to, where it was tried.
    """

    feed: Feed
    seconds: float
    only_checks: bool
    generators: Mapping[str, Any]
    step: Mapping[str, Any] | None


H = TypeVar("H", contravariant=True)


class Check(Protocol[H]):
    """One check; ``H`` is what it looks at."""

    @property
    def name(self) -> str: ...

    def look(self, here: H) -> Any:
        """What this rank sees: plain data. No collective, nothing changed, no random number drawn."""

    def judge(self, said: Sequence[Said]) -> Sequence[Finding]:
        """What all ranks saw, in rank order: one finding at least. Pure: the same on every rank."""


def groups(said: Sequence[Said], key: Callable[[Any], Hashable]) -> dict[Any, list[Said]]:
    """Who saw the same: ``key`` of the facts -> those ranks, the first rank's group first."""
    found: dict[Any, list[Said]] = {}
    for one in said:
        found.setdefault(key(one.facts), []).append(one)
    return found


def of_hosts(said: Sequence[Said]) -> list[list[Said]]:
    """The ranks of each machine."""
    found: dict[str, list[Said]] = {}
    for one in said:
        found.setdefault(one.host, []).append(one)
    return list(found.values())


def ranks_of(some: Sequence[Said]) -> tuple[int, ...]:
    return tuple(one.rank for one in some)


def who(some: Sequence[Said], said: Sequence[Said]) -> str:
    """``all ranks``, ``rank 1``, or, where there are several machines, ``ranks 4-7 (node2)``."""
    if len(some) == len(said):
        return "all ranks" if len(said) > 1 else "the only rank"
    hosts = list(dict.fromkeys(one.host for one in some))
    places = f" ({', '.join(hosts[:3])}{', ...' if len(hosts) > 3 else ''})"
    return ranks_in_words(ranks_of(some)) + (places if len({one.host for one in said}) > 1 else "")


def where(some: Sequence[Said], said: Sequence[Said]) -> str:
    """The machine that these ranks run on: ``this machine`` where there is only one."""
    return some[0].host if len({one.host for one in said}) > 1 else "this machine"


def spread(said: Sequence[Said], value: Callable[[Any], str]) -> str:
    """Each value with its ranks, equal ones together: ``5 on ranks 0-2, 6 on rank 3``; only the value if all agree."""
    found = groups(said, value)
    if len(found) == 1:
        return short(next(iter(found)))
    return ", ".join(f"{short(text)} on {who(some, said)}" for text, some in found.items())


def short(value: object) -> str:
    """One line of a length for people."""
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def size(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
