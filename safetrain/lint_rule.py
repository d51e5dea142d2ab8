"""A rule of the linter: a name, why the pattern hurts, what to do instead, and a pure function that finds it.

A rule is added by a function under ``@rule(...)`` in one of the ``lint_<topic>.py`` files: it gets a `Reading` and
yields `Place`s. It says nothing where it isn't sure: a linter with false alarms is switched off.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from safetrain.lint_reading import Reading


@dataclass(frozen=True)
class Place:
    """Where a rule found something, and what: ``what`` goes on after the rule's id, in a few words."""

    node: ast.AST
    what: str


Find = Callable[[Reading], Iterator[Place]]


@dataclass(frozen=True)
class Rule:
    """``why`` and ``fix`` are one sentence each."""

    id: str
    name: str
    why: str
    fix: str
    find: Find


RULES: dict[str, Rule] = {}
"""All rules by id, in the order of their ids once ``lint_command`` has imported them."""


def rule(id: str, name: str, *, why: str, fix: str) -> Callable[[Find], Find]:
    """Enter a function in ``RULES``."""

    def enter(find: Find) -> Find:
        RULES[id] = Rule(id, name, why, fix, find)
        return find

    return enter
