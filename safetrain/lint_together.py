"""Rules about calls that all ranks must make, and code that only some of them run (ST10x)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from safetrain.lint_meaning import (
    MAIN,
    OTHERS,
    collective,
    collective_inside,
    ends_process,
    guards,
    is_backward,
    is_ddp,
    is_distributed,
    leaves,
    side,
)
from safetrain.lint_reading import (
    FunctionNode,
    Reading,
    Scope,
    body_of,
    calls_in,
    dotted,
    in_else,
    is_constant,
    keyword,
    names_in,
)
from safetrain.lint_rule import Place, rule

_WHOSE = {MAIN: "is called on rank 0 only", OTHERS: "is not called on rank 0"}
_ASKS_THE_DISK = frozenset({"exists", "isfile", "isdir", "is_file", "is_dir", "lexists"})
_SAYS_BAD = frozenset({"skip", "bad", "nan", "inf", "invalid", "overflow", "nonfinite", "broken", "corrupt"})
_SAYS_GOOD = frozenset({"ok", "valid", "good", "finite", "healthy", "usable"})


@rule(
    "ST101",
    "collective-under-rank",
    why="The other ranks never make this call, so it waits for them until its timeout, or takes their next call "
    "for this one.",
    fix="Make the call on every rank; keep only what one rank does alone (printing, writing a file) under the "
    "condition.",
)
def collective_under_rank(code: Reading) -> Iterator[Place]:
    for call in code.calls:
        branch, ranks = next(guards(code, call), (None, ""))
        name, where = _joint(code, call) if ranks else ("", None)
        if not name or (branch is not None and _is_made_by_the_others(code, call, branch, ranks)):
            continue
        through = "" if where is None else f" (by {dotted(call.func)}, line {where.lineno})"
        some = "is called on some ranks only"
        yield Place(call, f"{name} {_WHOSE.get(ranks, some)}{through}")


def _is_made_by_the_others(code: Reading, call: ast.Call, branch: ast.If | ast.IfExp, ranks: str) -> bool:
    return (
        _in_other_arm(code, call, branch)
        or _on_both_sides(code, call, ranks)
        or _also_by_those_who_stay(code, call, branch)
    )


def _joint(code: Reading, call: ast.Call) -> tuple[str, ast.Call | None]:
    """The collective that a call is, or makes by a function of this file."""
    if name := collective(code, call):
        return name, None
    function = code.function(call)
    inside = collective_inside(code, function) if function is not None else None
    return inside if inside is not None else ("", None)


def _in_other_arm(code: Reading, call: ast.Call, branch: ast.If | ast.IfExp) -> bool:
    """``if rank == 0: gather(x, them) else: gather(x)``: all ranks make the call, each in its way."""
    child = next(child for around, child in code.within_scope(call) if around is branch)
    other = branch.body if in_else(branch, child) else branch.orelse
    return _ends(_joint(code, call)[0]) in _joint_names(code, other if isinstance(other, list) else [other])


def _on_both_sides(code: Reading, call: ast.Call, ranks: str) -> bool:
    """``if rank != 0: barrier()``, work, ``if rank == 0: barrier()``: rank 0 first, then the others."""
    name = _ends(_joint(code, call)[0])
    for other in _in_the_same_work(code, call):
        if other is not call and _ends(_joint(code, other)[0]) == name:
            sides = {found for _, found in guards(code, other)}
            if sides and ranks not in sides:
                return True
    return False


def _also_by_those_who_stay(code: Reading, call: ast.Call, branch: ast.If | ast.IfExp) -> bool:
    """``if rank != 0: barrier(); return``, work, ``barrier()``: the one below is rank 0's own."""
    if not isinstance(branch, ast.If) or branch.orelse or not leaves(code, branch.body):
        return False
    return _ends(_joint(code, call)[0]) in _joint_names(code, code.after(branch))


def _in_the_same_work(code: Reading, call: ast.Call) -> Iterator[ast.Call]:
    """The calls of the outermost function around: one defined in another belongs to its work."""
    around = [parent for parent, _ in code.ancestors(call) if isinstance(parent, FunctionNode)]
    outermost = around[-1] if around else code.tree
    return (node for node in ast.walk(outermost) if isinstance(node, ast.Call)) if around else calls_in(*code.tree.body)


def _joint_names(code: Reading, nodes: list[ast.stmt] | list[ast.expr]) -> set[str]:
    return {_ends(_joint(code, call)[0]) for call in calls_in(*nodes)} - {""}


def _ends(name: str) -> str:
    return name.rpartition(".")[2]


@rule(
    "ST102",
    "ddp-forward-under-rank",
    why="DDP's forward broadcasts buffers (BatchNorm's statistics), in eval mode too, and the other ranks are not "
    "there.",
    fix="Evaluate on every rank, or call the inner model on that rank: model.module(batch).",
)
def ddp_forward_under_rank(code: Reading) -> Iterator[Place]:
    for call in code.calls:
        wrapped = [one for one in code.assigned(call.func) if is_ddp(code, one.value)]
        if not wrapped or all(
            one.scope is code.scope_of(call) and one.statement.lineno > call.lineno for one in wrapped
        ):
            continue
        for branch, _ in guards(code, call):
            child = next((child for around, child in code.within_scope(call) if around is branch), None)
            other = [] if branch is None or child is None else branch.body if in_else(branch, child) else branch.orelse
            both = isinstance(other, list) and any(dotted(one.func) == dotted(call.func) for one in calls_in(*other))
            if not both:
                yield Place(call, f"the DDP model {dotted(call.func)} is called on some ranks only")
            break


@rule(
    "ST103",
    "exit-by-rank",
    why="The ranks that leave here never make the calls below, and those that stay wait for them.",
    fix="Let every rank go on to the last common call, and put what one rank does alone under a condition.",
)
def exit_by_rank(code: Reading) -> Iterator[Place]:
    for branch in code.nodes:
        if not isinstance(branch, ast.If) or (ranks := side(code, branch.test)) is None:
            continue
        leave = branch.body[-1]
        missed = _missed_by(code, branch, leave)
        paired = _joint_names(code, branch.body)
        for call in calls_in(*missed):
            name = _joint(code, call)[0] or (is_distributed(code) and is_backward(call) and dotted(call.func)) or ""
            if name and _ends(name) not in paired and not any(found == ranks for _, found in guards(code, call)):
                some = {MAIN: "rank 0 leaves", OTHERS: "all ranks but 0 leave"}.get(ranks, "some ranks leave")
                yield Place(leave, f"{some} before {name} in line {call.lineno}")
                break


def _missed_by(code: Reading, branch: ast.If, leave: ast.stmt) -> list[ast.stmt]:
    """What is not run by the ranks that leave: the rest of the function, of the loop's body, or every turn to come."""
    if isinstance(leave, ast.Return) or ends_process(code, leave):
        return code.after(branch)
    loop = code.loop_of(branch)
    if loop is None or not isinstance(leave, ast.Continue | ast.Break):
        return []
    return code.after(branch, until=loop)[:] if isinstance(leave, ast.Continue) else loop.body


@rule(
    "ST106",
    "collective-under-file-check",
    why="Ranks look at different times, and shared file systems answer late: some see the file and skip the call, "
    "others make it.",
    fix="Let rank 0 look and broadcast the answer, or make the call outside of the condition.",
)
def collective_under_file_check(code: Reading) -> Iterator[Place]:
    for branch in code.nodes:
        if not isinstance(branch, ast.If) or not _asks_the_disk(code, branch.test) or side(code, branch.test):
            continue
        taken, other = _joint_names(code, branch.body), _joint_names(code, branch.orelse)
        for call in calls_in(*branch.body, *branch.orelse):
            name = _joint(code, call)[0]
            if (
                name
                and not (_ends(name) in taken and _ends(name) in other)
                and not any(True for _ in guards(code, call))
            ):
                yield Place(call, f"whether {name} is called depends on a file that each rank looks for itself")
                break
        leave = branch.body[-1]
        if isinstance(leave, ast.Return):
            for call in calls_in(*code.after(branch)):
                if (name := _joint(code, call)[0]) and _ends(name) not in taken:
                    yield Place(leave, f"ranks that see the file leave before {name} in line {call.lineno}")
                    break


def _asks_the_disk(code: Reading, test: ast.AST) -> bool:
    return any(code.last_name(call) in _ASKS_THE_DISK for call in calls_in(test))


@rule(
    "ST107",
    "collective-in-join",
    why="DDP.join() answers only DDP's own collectives of a rank that is out of data: any other call waits for "
    "that rank.",
    fix="Make ranks agree at each step whether all have a batch, or cut the epoch to the shortest rank, and leave "
    "join() out.",
)
def collective_in_join(code: Reading) -> Iterator[Place]:
    for block in code.nodes:
        if not isinstance(block, ast.With) or not any(_joins(code, item.context_expr) for item in block.items):
            continue
        for call in calls_in(*block.body):
            if (name := collective(code, call)) and not is_backward(call):
                yield Place(call, f"{name} inside join()")


def _joins(code: Reading, context: ast.expr) -> bool:
    if not isinstance(context, ast.Call) or is_constant(keyword(context, "throw_on_early_termination"), True):
        return False
    of_model = (
        isinstance(context.func, ast.Attribute) and context.func.attr == "join" and is_ddp(code, context.func.value)
    )
    return of_model or code.name(context) == "torch.distributed.algorithms.Join"


@rule(
    "ST108",
    "collective-in-signal-handler",
    why="A signal reaches ranks at different steps, so the handler's call meets a call of training, not its own like.",
    fix="Let the handler only set a flag, and let all ranks agree on it at the next step.",
)
def collective_in_signal_handler(code: Reading) -> Iterator[Place]:
    functions = {node.name: node for node in code.nodes if isinstance(node, FunctionNode)}
    for call in code.calls:
        if code.name(call) != "signal.signal" or len(call.args) < 2:
            continue
        handler = functions.get(dotted(call.args[1]).rpartition(".")[2])
        if handler is not None and (found := collective_inside(code, handler)):
            yield Place(found[1], f"{found[0]} in the signal handler {handler.name}")


@rule(
    "ST109",
    "flag-reduced-the-wrong-way",
    why="The least of the ranks' flags says that all of them have it, the greatest that any has: one bad rank is "
    "overruled.",
    fix="Reduce what says 'bad' with MAX, and what says 'good' with MIN, so that one rank is enough.",
)
def flag_reduced_the_wrong_way(code: Reading) -> Iterator[Place]:
    for call in code.calls:
        if code.name(call) != "torch.distributed.all_reduce" or not call.args:
            continue
        operator = keyword(call, "op") or (call.args[1] if len(call.args) > 1 else None)
        reduction = code.last_name(operator) if operator is not None else ""
        flag = dotted(call.args[0]).rpartition(".")[2]
        words = set(re.split(r"[_\d]+", flag.lower())) | set(flag.lower().removeprefix("is").split("_"))
        if "not" in words or not _decides(code.scope_of(call), call, flag):
            continue
        if reduction == "MIN" and words & _SAYS_BAD and not words & _SAYS_GOOD:
            yield Place(call, f"MIN of {flag}: only if all ranks say so")
        elif reduction == "MAX" and words & _SAYS_GOOD and not words & _SAYS_BAD:
            yield Place(call, f"MAX of {flag}: one rank is enough")


def _decides(scope: Scope, call: ast.Call, flag: str) -> bool:
    """Whether a condition below asks for the flag."""
    return any(
        isinstance(node, ast.If | ast.While) and node.lineno >= call.lineno and flag in names_in(node.test)
        for node in body_of(scope)
    )
