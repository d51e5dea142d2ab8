"""What a ``failure.json`` says, in typed form. Nothing in it is taken for granted: what is missing or odd is left out.

A rank has said where it is (stalled.py), or left a record when it failed (failed.py), or only its exit is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from safetrain import causes
from safetrain.failure import headline
from safetrain.words import call_in_words, ranks_in_words

State = Literal["waiting", "stuck", "silent", "moving", "left", "paused", "failed", "victim", "ended"]
_SAID: tuple[State, ...] = ("waiting", "stuck", "silent", "moving", "left", "paused")
_LARGEST = 1 << 62
_KNOWN_LIMIT = 1 << 14  # ranks, and items of a list: more than a person reads


@dataclass(frozen=True)
class Call:
    """One collective of one rank; see flight_recorder.Collective."""

    group: str
    about: str
    members: frozenset[int]
    number: int
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    done: bool
    issued_ns: int | None
    ended_ns: int | None

    @property
    def key(self) -> tuple[str, int]:
        """The same on all ranks of its group, if they call the same."""
        return self.group, self.number

    def __str__(self) -> str:
        return call_in_words(self)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    is_users: bool
    source: str


@dataclass(frozen=True)
class Rank:
    """``seconds``: without progress; ``at_ns``: when it said so, or failed; ``since_ns``: when its phase began;
    ``last_seen``: of one that said nothing."""

    number: int
    host: str
    pid: int | None
    state: State
    phase: str
    step: int | None
    seconds: float | None
    at_ns: int | None
    since_ns: int | None
    calls: tuple[Call, ...]
    issued: tuple[str, ...]
    stack: tuple[Frame, ...]
    workers: tuple[tuple[str, tuple[Frame, ...]], ...]
    error: str
    traceback: str
    is_culprit: bool
    last_seen: str = ""

    @property
    def pending(self) -> Call | None:
        return next((call for call in self.calls if not call.done), None)

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the user's."""
        stacks = [stack for _, stack in self.workers] + [self.stack]
        return next((frame for stack in stacks for frame in reversed(stack) if frame.is_users), None)

    @property
    def doing(self) -> str:
        """``waits in all_reduce of 72 floats (the gradients), in vote at step 5, for 61 s``."""
        phase, _, name = self.phase.partition(":")
        where = f"{phase}({name!r})" if name else phase
        at = "" if self.step is None else f" at step {self.step}"
        long = f", for {self.seconds:,.0f} s" if self.seconds else ""
        if self.state == "failed":
            return f"failed{f' in {where}' if where else ''}{at}: {self.error}"
        if self.state == "victim":
            return f"did not fail; ended{at} because others did"
        if self.state == "ended":
            return self.error
        if self.state == "waiting" and self.pending and not name:
            return f"waits in {self.pending}{f', in {where}' if where else ''}{at}{long}"
        verbs = {"waiting": "waits", "stuck": "is stuck", "silent": "does not answer", "left": "has left fit()"}
        return f"{verbs.get(self.state, f'is {self.state}')}{f' in {where}' if where else ''}{at}{long}"

    @property
    def situation(self) -> tuple[object, ...]:
        """Equal for ranks that are at the same place."""
        call = self.pending if self.state == "waiting" else None
        at = call and (call.key, str(call))
        return self.is_culprit, self.state, self.phase, self.step, at, self.place, self.error


@dataclass(frozen=True)
class Facts:
    """All of it; the words are those of ``verdict.Verdict``."""

    sentence: str
    place: str
    detail: str
    batch: str
    others: tuple[str, ...]
    kept: str
    cause: str
    remedy: str
    evidence: tuple[str, ...]
    culprits: tuple[int, ...]
    ranks: tuple[Rank, ...]
    world_size: int
    time_ns: int | None
    versions: tuple[tuple[str, str], ...] = field(default=())

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.host for one in self.ranks if one.host))

    @property
    def unheard(self) -> tuple[int, ...]:
        """Ranks of which nothing is known."""
        return tuple(sorted(set(range(self.world_size)) - {one.number for one in self.ranks}))


def read(facts: object) -> Facts:
    """Of anything that JSON can hold."""
    of = _fields(facts)
    culprits = tuple(dict.fromkeys(_whole(one) for one in _items(of.get("culprits"))))
    ranks: dict[int, Rank] = {}
    for given in _items(of.get("ranks"))[:_KNOWN_LIMIT]:
        if isinstance(given, Mapping) and _count(given.get("rank")) is not None:
            one = _rank(given, culprits)
            ranks.setdefault(one.number, one)
    return Facts(
        sentence=_text(of.get("sentence")) or "Training failed; no rank says why.",
        **{key: _text(of.get(key)) for key in ("place", "detail", "batch", "kept", "cause", "remedy")},
        others=_texts(of.get("others")),
        evidence=_texts(of.get("evidence")),
        culprits=tuple(one for one in culprits if one is not None),
        ranks=tuple(ranks[number] for number in sorted(ranks)),
        world_size=min(max(_count(of.get("world_size")) or 0, len(ranks)), _KNOWN_LIMIT),
        time_ns=_count(of.get("time_ns")),
        versions=tuple((_text(name), _text(value)) for name, value in _fields(of.get("versions")).items()),
    )


def in_words(ranks: Sequence[int], world_size: int = 0) -> str:
    """``rank 1``, ``1,020 ranks (0, 2-1020)``."""
    if not ranks:
        return "no rank"
    words = ranks_in_words(sorted(ranks))
    if len(ranks) > 2 and len(ranks) == world_size:
        return f"all {len(ranks):,} ranks"
    return words if len(ranks) <= 4 else f"{len(ranks):,} ranks ({words.removeprefix('ranks ')})"


def _rank(of: Mapping[Any, Any], culprits: Sequence[int | None]) -> Rank:
    number, said, message = _count(of.get("rank")) or 0, _text(of.get("state")), _text(of.get("message"))
    kind, victim = _text(of.get("error")), of.get("victim") is True
    state: State = next((one for one in _SAID if one == said), "ended")
    error = ""
    if said == "" and "victim" in of:
        state = "victim" if victim else "failed"
        error = f"{kind}: {headline(message)}"
    elif state == "ended":
        error = causes.of_exit(_whole(of.get("code"))).partition(". ")[0].rstrip(".")
    return Rank(
        number=number,
        host=_text(of.get("host")),
        pid=_count(of.get("pid")),
        state=state,
        phase=_text(of.get("phase")),
        step=_count(of.get("step")),
        seconds=_seconds(of.get("seconds")),
        at_ns=_count(of.get("time_ns")) or None,
        since_ns=_count(of.get("since_ns")) or None,
        calls=tuple(_call(one) for one in _items(of.get("collectives")) if isinstance(one, Mapping)),
        issued=_texts(of.get("calls")),
        stack=_stack(of.get("stack")),
        workers=tuple((_text(w.get("pid")), _stack(w.get("stack"))) for w in map(_fields, _items(of.get("workers")))),
        error=error,
        traceback=_text(of.get("traceback")),
        is_culprit=number in culprits,
        last_seen=_text(of.get("last_seen")),
    )


def _call(of: Mapping[Any, Any]) -> Call:
    members = (_count(one) for one in _items(of.get("members")))
    shapes = (tuple(n for n in map(_count, _items(shape)) if n is not None) for shape in _items(of.get("shapes")))
    return Call(
        group=_text(of.get("group")),
        about=_text(of.get("about")),
        members=frozenset(one for one in members if one is not None),
        number=_count(of.get("number")) or 0,
        op=_text(of.get("op")) or "a collective",
        shapes=tuple(shapes),
        dtype=_text(of.get("dtype")),
        done=of.get("done") is True,
        issued_ns=_count(of.get("issued_ns")) or None,
        ended_ns=_count(of.get("ended_ns")) or None,
    )


def _stack(value: object) -> tuple[Frame, ...]:
    return tuple(
        Frame(
            _text(of.get("file")), _count(of.get("line")) or 0, _text(of.get("function")), of.get("user") is True,
            _text(of.get("source")),
        )
        for of in map(_fields, _items(value))
        if of
    )  # fmt: skip


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and abs(value) < _LARGEST else ""


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_text(one) for one in _items(value))


def _items(value: object) -> Sequence[Any]:
    return value[:_KNOWN_LIMIT] if isinstance(value, (list, tuple)) else ()


def _fields(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST else None


def _count(value: object) -> int | None:
    number = _whole(value)
    return number if number is not None and number >= 0 else None


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        return None
    return float(value) if math.isfinite(value) else None
