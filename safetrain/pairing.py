"""Whether the collectives that the ranks issued belong together: pure functions over what each rank did.

A backend pairs the first call of one rank with the first of another, the second with the second, whatever they are.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetrain.words import ranks_in_words

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ROLES = ("barrier", "broadcast", "reduce", "gather", "scatter", "rank_zero")


@dataclass(frozen=True, slots=True)
class Call:
    """One collective that one rank issued.

    Attributes:
        op: the public function, with its reduce op or root: ``all_reduce(MAX)``, ``broadcast(from 0)``.
        operand: dtype and shape, such as ``float32[2, 6]``; empty where it may differ between ranks.
        group: its name; ``members`` are the ranks in it.
        site: ``file:line`` of the user's frames, innermost first.
    """

    op: str
    operand: str
    group: str
    members: tuple[int, ...]
    site: tuple[str, ...]

    @property
    def paired_by(self) -> tuple[str, str]:
        """What must be equal for two calls to belong together."""
        return self.op, self.operand

    def __str__(self) -> str:
        operand = f" of {self.operand}" if self.operand else ""
        where = f" at {self.site[0]}" if self.site else ", called by a library"
        return f"{self.op}{operand}{where}" + (f", called from {self.site[1]}" if len(self.site) > 1 else "")


Sites = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Comparison:
    """What the ranks' lists come to.

    Attributes:
        difference: in words, why the ranks' calls do not belong together; empty where they do.
        alike: pairs of call sites that are two ways to the same collective (two branches of an ``if``).
        doubtful: those of ``alike`` about which nothing could be found out.
    """

    difference: str = ""
    alike: tuple[Sites, ...] = ()
    doubtful: tuple[Sites, ...] = ()


def compare(calls_by_rank: Sequence[Sequence[Call]]) -> Comparison:
    """Compare the calls since the last vote, group by group."""
    alike: list[Sites] = []
    doubtful: list[Sites] = []
    for group, members in sorted({(call.group, call.members) for calls in calls_by_rank for call in calls}):
        calls = {rank: [c for c in calls_by_rank[rank] if c.group == group] for rank in members}
        index = _first_difference(calls, site_counts=True)
        if index is None:
            continue
        other_order = len({frozenset(Counter(c).items()) for c in calls.values()}) == 1
        if other_order or _first_difference(calls, site_counts=False) is not None:
            return Comparison(_tell(calls, index, other_order))
        first = min(calls)
        for rank in calls:
            for at, (a, b) in enumerate(zip(calls[first], calls[rank], strict=True)):
                if a.site == b.site or (a.site, b.site) in alike:
                    continue
                same = True if a.op.startswith(_ROLES) else are_alternatives(a.site, b.site)
                if same is False:
                    return Comparison(_tell(calls, at, other_order=False))
                alike.append((a.site, b.site))
                if same is None:
                    doubtful.append((a.site, b.site))
    return Comparison(alike=tuple(alike), doubtful=tuple(doubtful))


def are_alternatives(a: Sequence[str], b: Sequence[str]) -> bool | None:
    """Whether a run passes only one of two call sites, as with the branches of an ``if``; None: can't tell.

    Looks at the outermost frame in which the two differ.
    """
    for place_a, place_b in zip(reversed(a), reversed(b), strict=False):
        if place_a != place_b:
            (file_a, _, line_a), (file_b, _, line_b) = place_a.rpartition(":"), place_b.rpartition(":")
            tree = _parsed(file_a) if file_a == file_b else None
            return None if tree is None else _exclusive(_path(tree, int(line_a)), _path(tree, int(line_b)))
    return None


Step = tuple[ast.AST, str, int]  # a node, the field of it that is entered, and the index in that


@cache
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return None


def _path(node: ast.AST, line: int) -> list[Step]:
    """The statements that lead to ``line``, outermost first."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else []):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                first = child.lineno if not isinstance(child, ast.match_case) else child.pattern.lineno
                last = child.end_lineno if not isinstance(child, ast.match_case) else child.body[-1].end_lineno
                if first <= line <= (last or first):
                    return [(node, field, index), *_path(child, line)]
    return []


def _exclusive(a: list[Step], b: list[Step]) -> bool | None:
    for depth, ((node, field_a, index_a), (_, field_b, index_b)) in enumerate(zip(a, b, strict=False)):
        if (field_a, index_a) == (field_b, index_b):
            continue
        if any(isinstance(step[0], _FUNCTIONS) for step in (*a[depth + 1 :], *b[depth + 1 :])):
            return None  # two functions, called from one line
        if field_a != field_b:
            return isinstance(node, (ast.If, ast.Try))
        earlier = a if index_a < index_b else b
        return isinstance(node, ast.Match) or any(_leaves(step) for step in earlier[depth + 1 :])
    return None


def _leaves(step: Step) -> bool:
    node, field, _ = step
    block: Any = getattr(node, field)
    return isinstance(node, (ast.If, ast.Try, ast.match_case)) and isinstance(block[-1], _LEAVES)


def _first_difference(calls: Mapping[int, Sequence[Call]], *, site_counts: bool) -> int | None:
    def key(call: Call) -> Any:
        return call if site_counts else call.paired_by

    for index in range(max(map(len, calls.values()))):
        if len({key(c[index]) if index < len(c) else None for c in calls.values()}) > 1:
            return index
    return None


def _tell(calls: Mapping[int, Sequence[Call]], index: int, other_order: bool) -> str:
    """The two or more sides at ``index``, and what the difference is."""
    sides: dict[str, list[int]] = {}
    for rank, issued in calls.items():
        sides.setdefault(str(issued[index]) if index < len(issued) else "nothing more", []).append(rank)
    here = [issued[index] for issued in calls.values() if index < len(issued)]
    lines = [f"  {ranks_in_words(ranks)}: {side}" for side, ranks in sides.items()]
    return "\n".join([f"{_kind(calls, here, other_order)}:", *lines, _remedy(calls, other_order)])


def _kind(calls: Mapping[int, Sequence[Call]], here: Sequence[Call], other_order: bool) -> str:
    if other_order:
        return "the ranks issued the same collectives in another order, and they were paired across"
    if len(set(map(len, calls.values()))) > 1:
        counts = ", ".join(f"{len(issued)} on rank {rank}" for rank, issued in calls.items())
        return f"the ranks issued different numbers of collectives ({counts})"
    if len({call.op for call in here}) > 1:
        return "the ranks issued different collectives, and they were paired with each other"
    if len({call.operand for call in here}) > 1:
        return "the ranks gave one collective tensors of different kinds"
    return "the ranks issued collectives from different lines, and they were paired with each other"


def _remedy(calls: Mapping[int, Sequence[Call]], other_order: bool) -> str:
    remedy = "Every rank must issue the same collectives, of the same shape and dtype, in the same order: "
    if other_order:
        return remedy + "order them by something all ranks share, never by a set or by what is ready first."
    union = set().union(*map(set, calls.values()))
    only = [(call, [rank for rank, c in calls.items() if call not in c]) for call in sorted(union, key=str)]
    skipped = [f"{call} was left out on {ranks_in_words(ranks)}" for call, ranks in only if ranks]
    if len(set(map(len, calls.values()))) > 1 and skipped:
        return f"{'; '.join(skipped[:3])}. {remedy}look for a branch, return or exception that only some ranks take."
    return remedy + "look for a branch that only some ranks take (in if/else, the two may stand on different lines)."
