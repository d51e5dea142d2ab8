"""One file of Python, read for the linter: whose name a name is, what was assigned to it, what stands around a node.

Nothing is imported and nothing run. What can't be seen in the file is unknown, and rules say nothing about the unknown.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Scope = FunctionNode | ast.Module
Loop = ast.For | ast.AsyncFor | ast.While
_APART = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_BLOCKS = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class Assigned:
    """One assignment: the value, the statement, the function (or module) and the class that it is in.

    ``whole`` is false where the name gets a part of the value: ``model, optimizer = prepare(...)``.
    """

    value: ast.expr
    whole: bool
    statement: ast.stmt
    scope: Scope
    owner: ast.ClassDef | None


class Reading:
    """A parsed file. ``path`` is how the user named it."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.lines = source.splitlines()
        self.tree = ast.parse(source)
        self.nodes: list[ast.AST] = []
        self._parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            self.nodes.append(node)
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
        self.imports = _imports(self.nodes)
        self.remembered: dict[tuple[str, ast.AST], object] = {}
        self._mentioned: dict[tuple[str, ...], bool] = {}
        self.calls = sorted((node for node in self.nodes if isinstance(node, ast.Call)), key=position)

    def name(self, node: ast.AST) -> str:
        """The dotted name of a name or of what is called, imports resolved (``dist.barrier`` is
        ``torch.distributed.barrier``); empty for anything else."""
        if isinstance(node, ast.Call):
            node = node.func
        first, _, rest = dotted(node).partition(".")
        return ".".join(filter(None, (self.imports.get(first, first), rest)))

    def last_name(self, node: ast.AST) -> str:
        """The last part of a name or of what is called, also where the rest is no name (``f()[0].save``)."""
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Attribute):
            return node.attr
        return self.name(node).rpartition(".")[2]

    def mentions(self, *beginnings: str) -> bool:
        """Whether the file imports or names something that begins so."""
        if beginnings not in self._mentioned:
            self._mentioned[beginnings] = any(name.startswith(beginnings) for name in self._names)
        return self._mentioned[beginnings]

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """``(around, child)`` from the innermost outwards; ``child`` is the part of ``around`` that holds the node."""
        while (parent := self._parents.get(node)) is not None:
            yield parent, node
            node = parent

    def scope_of(self, node: ast.AST) -> Scope:
        """The function that a node is in, or the module."""
        around = (parent for parent, _ in self.ancestors(node) if isinstance(parent, FunctionNode | ast.Module))
        return next(around, self.tree)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class that a node is in."""
        return next((parent for parent, _ in self.ancestors(node) if isinstance(parent, ast.ClassDef)), None)

    def within_scope(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """``ancestors``, up to the function's own node."""
        for around, child in self.ancestors(node):
            if isinstance(around, _APART):
                return
            yield around, child

    def loop_of(self, node: ast.AST) -> Loop | None:
        """The innermost loop around a node, in its own function."""
        return next((around for around, _ in self.within_scope(node) if isinstance(around, Loop)), None)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement that a node is part of."""
        if isinstance(node, ast.stmt):
            return node
        return next(parent for parent, _ in self.ancestors(node) if isinstance(parent, ast.stmt))

    def after(self, node: ast.AST, until: ast.AST | None = None) -> list[ast.stmt]:
        """The statements that follow one: in its block, in the one around, ... up to ``until`` or the function."""
        following: list[ast.stmt] = []
        for around, child in self.ancestors(node):
            for field in _BLOCKS:
                block = getattr(around, field, None)
                if isinstance(block, list) and child in block:
                    following += block[block.index(child) + 1 :]
            if around is until or isinstance(around, _APART):
                break
        return following

    def exclude_each_other(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether the two are in different arms of one ``if``, so that never both are run."""
        arms = {around: child for around, child in self.within_scope(one) if isinstance(around, ast.If)}
        for around, child in self.within_scope(other):
            if (
                isinstance(around, ast.If)
                and around in arms
                and in_else(around, child) != in_else(around, arms[around])
            ):
                return True
        return False

    def assigned(self, node: ast.AST) -> list[Assigned]:
        """What was assigned to a name where the node stands; nothing for a parameter and for what others give it."""
        key = dotted(node)
        found = self._assignments.get(key, [])
        if key.startswith("self."):
            owner = self.class_of(node)
            return [one for one in found if one.owner is owner]
        if "." in key:
            return found
        scopes = [parent for parent, _ in self.ancestors(node) if isinstance(parent, FunctionNode | ast.Module)]
        for scope in scopes:
            here = [one for one in found if one.scope is scope]
            if here or (isinstance(scope, FunctionNode) and key in parameters_of(scope)):
                return here
        return []

    def function(self, call: ast.Call) -> FunctionNode | None:
        """The function of this file that is called: by its name, or by ``self.name`` inside its class."""
        key = dotted(call.func)
        if key.startswith("self."):
            return self._functions.get((self.class_of(call), key.removeprefix("self.")))
        return self._functions.get((None, key))

    def calls_of(self, function: FunctionNode) -> list[ast.Call]:
        """Where this file calls one of its functions."""
        return [
            call for call in self.calls if self.last_name(call) == function.name and self.function(call) is function
        ]

    @functools.cached_property
    def _names(self) -> set[str]:
        written = {self.name(node) for node in self.nodes if isinstance(node, ast.Attribute)}
        return written | set(self.imports.values())

    @functools.cached_property
    def _functions(self) -> dict[tuple[ast.ClassDef | None, str], FunctionNode]:
        return {(self.class_of(node), node.name): node for node in self.nodes if isinstance(node, FunctionNode)}

    @functools.cached_property
    def _assignments(self) -> dict[str, list[Assigned]]:
        found: dict[str, list[Assigned]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                pairs = _pairs(node.target, node.value)
            elif isinstance(node, ast.With | ast.AsyncWith):
                pairs = [
                    pair
                    for item in node.items
                    if item.optional_vars is not None
                    for pair in _pairs(item.optional_vars, item.context_expr)
                ]
            else:
                continue
            for key, value, whole in pairs:
                one = Assigned(value, whole, node, self.scope_of(node), self.class_of(node))
                found.setdefault(key, []).append(one)
        return found


def dotted(node: ast.AST) -> str:
    """``a.b.c`` as it is written, or empty where the node is no such name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def position(node: ast.AST) -> tuple[int, int]:
    """Line and column, both as Python counts them."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def in_else(branch: ast.If | ast.IfExp, child: ast.AST) -> bool:
    """Whether a direct child of an ``if`` is what is done otherwise."""
    return child in branch.orelse if isinstance(branch.orelse, list) else child is branch.orelse


def walk(*roots: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, in the order of the source, without what is in functions and classes that are defined there."""
    for root in roots:
        yield root
        if not isinstance(root, _APART):
            yield from walk(*ast.iter_child_nodes(root))


def body_of(scope: Scope) -> Iterator[ast.AST]:
    """All nodes of a function's or module's own body, in the order of the source."""
    return walk(*scope.body)


def calls_in(*roots: ast.AST) -> Iterator[ast.Call]:
    """All calls below, in the order of the source, without those of functions that are defined there."""
    return (node for node in walk(*roots) if isinstance(node, ast.Call))


def names_in(*roots: ast.AST) -> set[str]:
    """Every name and dotted name below."""
    names = {dotted(node) for root in roots for node in ast.walk(root) if isinstance(node, ast.Name | ast.Attribute)}
    return names - {""}


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((one.value for one in call.keywords if one.arg == name), None)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Whether a node is that very constant (``True`` is not 1)."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def parameters_of(function: FunctionNode) -> set[str]:
    """The names of a function's parameters."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {one.arg for one in every if one is not None}


def targets_in(target: ast.expr) -> Iterator[str]:
    """The names that an assignment or a loop gives a value."""
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from targets_in(part)
    elif isinstance(target, ast.Starred):
        yield from targets_in(target.value)
    elif key := dotted(target):
        yield key


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr, bool]]:
    if not isinstance(target, ast.Tuple | ast.List):
        return [(key, value, True) for key in targets_in(target)]
    if isinstance(value, ast.Tuple | ast.List) and len(target.elts) == len(value.elts):
        return [pair for part, its in zip(target.elts, value.elts, strict=True) for pair in _pairs(part, its)]
    return [(key, value, False) for key in targets_in(target)]


def _imports(nodes: Iterable[ast.AST]) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                names.setdefault(f"import {alias.name}", alias.name)  # no name of the code: only that it is imported
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                names[alias.asname or alias.name] = f"{origin}.{alias.name}"
    return names
