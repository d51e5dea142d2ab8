"""How code may have gone past a line: the conditions that it stands under, and the ways out before it.

Read from the source; for a person who has to find out why one rank came to a collective and another did not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetrain.failure import is_user_file
from safetrain.stacks import Frame

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.While, ast.For, ast.Try, ast.Match)
_WORDS = {ast.Return: "return", ast.Continue: "continue", ast.Break: "break"}


def ways_past(stack: Sequence[Frame]) -> list[str]:
    """In words, with ``file:line``, for the innermost of the user's frames in which there are any; nearest last."""
    for frame in reversed(stack):
        if is_user_file(frame.file) and (found := list(_ways_past(frame))):
            return found
    return []


def _ways_past(frame: Frame) -> Iterator[str]:
    function = _function_at(frame)
    if function is None:
        return
    for node, branches in _walk(function, []):
        word = _WORDS.get(type(node))
        if word and branches and node.lineno < frame.line:
            yield f"the {word} at {frame.file}:{node.lineno}{_condition(branches[-1])}"
        elif isinstance(node, ast.If) and node.lineno < frame.line <= (node.end_lineno or 0):
            yield f"the condition at {frame.file}:{node.lineno}{_condition(node)}"


def _function_at(frame: Frame) -> ast.AST | None:
    """The innermost function that the line is in."""
    try:
        module = ast.parse(Path(frame.file).read_text())
    except (OSError, SyntaxError, ValueError):
        return None
    around = [
        node
        for node in ast.walk(module)
        if isinstance(node, _FUNCTIONS) and node.lineno <= frame.line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _walk(node: ast.AST, branches: list[ast.stmt]) -> Iterator[tuple[ast.stmt, list[ast.stmt]]]:
    """The statements of a function, in order, each with the branches round it; not those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(child, ast.stmt):
            yield child, branches
        inner = [*branches, child] if isinstance(child, _BRANCHES) else branches
        yield from _walk(child, inner)


def _condition(branch: ast.stmt) -> str:
    return f" (if {ast.unparse(branch.test)})" if isinstance(branch, ast.If) else ""
