"""Slurm's short forms: ``node[01-03,07]`` for names of machines, ``2(x3),1`` for numbers of tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from safetrain.errors import UsageError

_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_in(text: str) -> list[str]:
    """``node[01-03,07],gpu1`` is node01, node02, node03, node07, gpu1; several brackets are combined in order.

    Raises:
        UsageError: it can't be read.
    """
    if text.count("[") != text.count("]"):
        raise _unreadable(text)
    return [host for part in _PART.findall(text) for host in _hosts(part, text)]


def counts_per_node(text: str) -> list[int]:
    """``2(x3),1`` is 2, 2, 2, 1."""
    counts = []
    for part in filter(None, text.split(",")):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise _unreadable(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _hosts(part: str, text: str) -> Iterator[str]:
    match = _BRACKETS.search(part)
    if match is None:
        yield part
        return
    before, after = part[: match.start()], part[match.end() :]
    for piece in match[1].split(","):
        first, _, last = piece.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise _unreadable(text)
        for number in range(int(first), int(last or first) + 1):
            for rest in _hosts(after, text):
                yield f"{before}{number:0{len(first)}}{rest}"


def _unreadable(text: str) -> UsageError:
    return UsageError(f"SLURM's list {text!r} can't be read: it should look like node[01-03,07] or 2(x3),1")
