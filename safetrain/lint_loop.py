"""Rules about training loops that one rank can leave, or skip a part of, because of its own data (ST104, ST105)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from safetrain.lint_meaning import collective, ends_process, is_backward, is_ddp, is_distributed
from safetrain.lint_reading import Loop, Reading, calls_in, dotted, names_in, targets_in, walk
from safetrain.lint_rule import Place, rule

_FINITE = frozenset({"isnan", "isinf", "isfinite"})
_AGREES = re.compile(
    r"reduce|gather|sync|agree|broadcast|vote|all_?(rank|true|any)|any_?rank|allreduce|global|average|world", re.I
)
_COUNTS = frozenset({"range", "trange", "count"})
_COUNTER = re.compile(
    r"_|i|j|k|n|ii|it|ni|num|idx|index|iter(ation)?|step|(\w+_)?(idx|index|iter|step|i|num|id|nb)", re.I
)
_ABOUT_RANKS = re.compile(r"rank|world|distributed|ddp|dist", re.I)
_SHAPES = frozenset({"shape", "size", "ndim", "dim", "dtype", "device", "type", "isinstance", "hasattr", "callable"})
_SWALLOWED_WITHOUT_HARM = frozenset(
    {"KeyboardInterrupt", "StopIteration", "SystemExit", "ImportError", "AttributeError"}
)


@rule(
    "ST104",
    "exit-by-data",
    why="Each rank decides from its own batch, so one leaves out a reduction that the others are in; from then on "
    "calls pair wrongly.",
    fix="Reduce the decision first (all_reduce of a flag with MAX), and let all ranks act on the result.",
)
def exit_by_data(code: Reading) -> Iterator[Place]:
    if not is_distributed(code):
        return
    for loop in code.nodes:
        if not isinstance(loop, Loop) or not _trains(code, loop):
            continue
        if any(is_backward(call) and code.loop_of(call) is loop for call in calls_in(*loop.body)):
            yield from _Turn(code, loop).places()


class _Turn:
    """One turn of a training loop, followed in order: which names hold what only this rank knows."""

    def __init__(self, code: Reading, loop: Loop) -> None:
        self.code, self.loop = code, loop
        self.own: set[str] = set(_items_of(loop)) if isinstance(loop, ast.For | ast.AsyncFor) else set()

    def places(self) -> Iterator[Place]:
        yield from self._follow(self.loop.body)

    def _follow(self, block: list[ast.stmt]) -> Iterator[Place]:
        for statement in block:
            if isinstance(statement, ast.If):
                if self._depends(statement.test):
                    yield from self._judge(statement)
                yield from self._follow(statement.body)
                yield from self._follow(statement.orelse)
            elif isinstance(statement, ast.With | ast.AsyncWith):
                yield from self._follow(statement.body)
            elif isinstance(statement, ast.Try):
                yield from self._follow([*statement.body, *statement.orelse, *statement.finalbody])
            else:
                self._note(statement)

    def _note(self, statement: ast.stmt) -> None:
        agreed = any(collective(self.code, call) or _AGREES.search(dotted(call.func)) for call in calls_in(statement))
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = {name for target in targets for name in targets_in(target)}
            local = not agreed and (self._mentions(statement.value) or self._runs_model(statement.value))
            self.own = self.own | names if local else self.own - names
        elif agreed:
            self.own -= names_in(statement)  # what has been reduced in place is the same on all ranks

    def _runs_model(self, value: ast.expr) -> bool:
        return any(is_ddp(self.code, call.func) for call in calls_in(value))

    def _mentions(self, node: ast.AST) -> bool:
        return any(name in self.own and not _AGREES.search(name) for name in names_in(node))

    def _depends(self, test: ast.expr) -> bool:
        """Whether a condition is about values that only this rank has; shapes and types are alike on all."""
        if any(_AGREES.search(dotted(call.func)) for call in calls_in(test)):
            return False
        return any(self._asks_values(node) for node in walk(test))

    def _asks_values(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return self.code.last_name(node) in _FINITE and self._mentions(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return bool(dotted(node.operand)) and self._mentions(node.operand)
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            return False
        left, right = node.left, node.comparators[0]
        if isinstance(node.ops[0], ast.Is | ast.IsNot):
            return dotted(left) in self.own and self._mentions(left)
        if isinstance(node.ops[0], ast.In | ast.NotIn) or any(_is_text(side) for side in (left, right)):
            return False
        of_shape = {
            self.code.last_name(one) for one in walk(left, right) if isinstance(one, ast.Call | ast.Attribute)
        } & _SHAPES
        counts = any(self.code.last_name(call) == "len" for call in calls_in(left, right))
        compared_with_0 = any(isinstance(side, ast.Constant) and side.value == 0 for side in (left, right))
        return (self._mentions(left) or self._mentions(right)) and (compared_with_0 or not (of_shape or counts))

    def _judge(self, branch: ast.If) -> Iterator[Place]:
        for arm, other in ((branch.body, branch.orelse), (branch.orelse, branch.body)):
            for leave in walk(*arm):
                if not isinstance(leave, ast.Continue | ast.Break | ast.Return):
                    continue
                if not isinstance(leave, ast.Return) and self.code.loop_of(leave) is not self.loop:
                    continue
                if (missed := self._missed(branch, leave)) is not None:
                    word = type(leave).__name__.lower()
                    yield Place(
                        leave,
                        f"{word} by this rank's own data, past {_called(missed)} in line {missed.lineno}",
                    )
                    return
            backward = next((call for call in calls_in(*arm) if is_backward(call)), None)
            if (
                backward is not None
                and not any(is_backward(call) for call in calls_in(*other))
                and not self._left(other)
            ):
                yield Place(
                    branch, f"whether backward (line {backward.lineno}) is called depends on this rank's own data"
                )
                return

    def _missed(self, branch: ast.If, leave: ast.stmt) -> ast.Call | None:
        missed = self.code.after(branch, until=self.loop) if isinstance(leave, ast.Continue) else self.loop.body
        return next((call for call in calls_in(*missed) if self._is_joint(call)), None)

    def _is_joint(self, call: ast.Call) -> bool:
        joint = is_backward(call) or _steps(call) or is_ddp(self.code, call.func)
        return joint or bool(collective(self.code, call))

    def _left(self, arm: list[ast.stmt]) -> bool:
        return any(isinstance(one, ast.Raise) or ends_process(self.code, one) for one in arm)


def _items_of(loop: ast.For | ast.AsyncFor) -> Iterator[str]:
    """The names that hold a batch; not what counts (``enumerate``, ``range``): it is alike on all ranks."""
    if any(dotted(call.func).rpartition(".")[2] in _COUNTS for call in calls_in(loop.iter)):
        return
    parts = loop.target.elts if isinstance(loop.target, ast.Tuple | ast.List) else [loop.target]
    for name in (name for part in parts for name in targets_in(part)):
        if not _COUNTER.fullmatch(name.rpartition(".")[2]):
            yield name


def _trains(code: Reading, node: ast.AST) -> bool:
    """Whether an optimizer is at work around a node: not every backward trains, some only measure."""
    scope = code.scope_of(node)
    return any(code.last_name(call) == "zero_grad" or _steps(call) for call in calls_in(*scope.body))


def _steps(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "step" else None
    return owner is not None and re.search(r"optim|^opt|scaler", dotted(owner).rpartition(".")[2], re.I) is not None


def _called(call: ast.Call) -> str:
    return dotted(call.func) or (call.func.attr if isinstance(call.func, ast.Attribute) else "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bool)


@rule(
    "ST105",
    "swallowed-exception",
    why="The rank that failed has sent only some of its gradients; it goes on with the next batch while the "
    "others wait in this one.",
    fix="Let the exception end the rank, or let all ranks agree after each step whether one failed, before any "
    "goes on.",
)
def swallowed_exception(code: Reading) -> Iterator[Place]:
    if not is_distributed(code):
        return
    for attempt in code.nodes:
        if not isinstance(attempt, ast.Try) or code.loop_of(attempt) is None or not _trains(code, attempt):
            continue
        step = next((call for call in calls_in(*attempt.body) if is_backward(call) or is_ddp(code, call.func)), None)
        if step is None:
            continue
        for handler in attempt.handlers:
            caught = (
                {dotted(node).rpartition(".")[2] for node in walk(handler.type)} if handler.type is not None else set()
            )
            agreed = any(
                collective(code, call) or _AGREES.search(dotted(call.func)) for call in calls_in(*handler.body)
            )
            harmless = bool(caught) and caught <= _SWALLOWED_WITHOUT_HARM | {""}
            if harmless or agreed or _always_raises(code, handler.body) or _only_alone(handler.body):
                continue
            yield Place(
                handler,
                f"an exception of {_called(step)} (line {step.lineno}) is caught, and training goes on",
            )


def _only_alone(block: list[ast.stmt]) -> bool:
    """Whether the handler raises where there are several ranks, and goes on where there is one."""
    tests = [
        node
        for node in walk(*block)
        if isinstance(node, ast.If) and any(isinstance(one, ast.Raise) for one in node.body)
    ]
    return any(_ABOUT_RANKS.search(name) for node in tests for name in names_in(node.test))


def _always_raises(code: Reading, block: list[ast.stmt]) -> bool:
    last = block[-1]
    if isinstance(last, ast.If) and last.orelse:
        return _always_raises(code, last.body) and _always_raises(code, last.orelse)
    return isinstance(last, ast.Raise) or ends_process(code, last)
