"""Rules about the wrapped model and its optimizer (ST304-ST309)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from safetrain.lint_meaning import is_backward, is_ddp, is_distributed, wraps_ddp
from safetrain.lint_reading import (
    Assigned,
    Reading,
    body_of,
    calls_in,
    dotted,
    is_constant,
    keyword,
    names_in,
    targets_in,
    walk,
)
from safetrain.lint_rule import Place, rule

_MOVES = frozenset({"to", "cuda", "half", "double", "float", "bfloat16", "xpu"})
_REPLACES = ("FullyShardedDataParallel", "fully_shard", "fully_shard.fully_shard", "peft.get_peft_model")
_OPTIMIZER = re.compile(r"optim|^(SGD|Adam|AdamW|Adagrad|RMSprop|LBFGS|Lion|LAMB)$", re.I)


@rule(
    "ST304",
    "optimizer-before-parameters",
    why="The optimizer holds the parameters from before; those that are trained now are others, and no step moves "
    "them.",
    fix="Make the optimizer last: after the model is wrapped, sharded, or has its new layers.",
)
def optimizer_before_parameters(code: Reading) -> Iterator[Place]:
    for made in code.nodes:
        if not isinstance(made, ast.Assign) or not isinstance(made.value, ast.Call):
            continue
        model = _optimized(code, made.value)
        scope = body_of(code.scope_of(made)) if model else iter(())
        later = [node for node in scope if isinstance(node, ast.stmt) and node.lineno > made.lineno]
        if any(isinstance(node, ast.Assign) and {*_targets(node)} & {*_targets(made)} for node in later):
            continue  # it is made again
        for node in (node for node in later if not code.exclude_each_other(node, made)):
            if what := _replaces(code, node, model):
                yield Place(made, f"the optimizer is made before {what} in line {node.lineno}")
                break


def _targets(node: ast.Assign) -> list[str]:
    return [name for target in node.targets for name in targets_in(target)]


def _optimized(code: Reading, call: ast.Call) -> str:
    """The model whose parameters an optimizer is made of."""
    if not _OPTIMIZER.search(code.name(call)) or not call.args:
        return ""
    first = call.args[0]
    plain = isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters"
    return (
        dotted(first.func.value)
        if plain and isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute)
        else ""
    )


def _replaces(code: Reading, node: ast.stmt, model: str) -> str:
    value = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    if (
        isinstance(value, ast.Call)
        and code.name(value).endswith(_REPLACES)
        and value.args
        and dotted(value.args[0]) == model
    ):
        return dotted(value.func)
    if isinstance(node, ast.Assign) and isinstance(value, ast.Call) and code.name(value).startswith("torch.nn."):
        layer = next((name for name in _targets(node) if name.startswith(f"{model}.")), "")
        return f"{layer} is replaced" if layer else ""
    return ""


@rule(
    "ST305",
    "moved-after-wrap",
    why="DDP has made its buckets and hooks for the parameters as they were; after a move or a cast gradients may "
    "not be reduced at all.",
    fix="Move and cast the model first, then wrap it.",
)
def moved_after_wrap(code: Reading) -> Iterator[Place]:
    for call in code.calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _MOVES:
            continue
        owner = call.func.value
        if (isinstance(owner, ast.Call) and is_ddp(code, owner)) or (
            dotted(owner) and _is_ddp_by_now(code, owner, call)
        ):
            yield Place(call, f"{dotted(owner) or 'the model'}.{call.func.attr}(...) after it was wrapped in DDP")


def _is_ddp_by_now(code: Reading, owner: ast.expr, call: ast.Call) -> bool:
    here = code.scope_of(call)
    before = [
        one for one in code.assigned(owner) if one.scope is here and (one.statement.end_lineno or 0) < call.lineno
    ]
    before = [one for one in before if not code.exclude_each_other(one.statement, call)]
    last: Assigned | None = max(before, key=lambda one: one.statement.lineno, default=None)
    return last is not None and is_ddp(code, last.value)


@rule(
    "ST306",
    "forward-past-wrapper",
    why="DDP prepares the reduction in its own forward; by the inner model, backward reduces nothing and every "
    "rank trains alone.",
    fix="Call the wrapped model; reach for .module only to read it, to save it, or under no_grad.",
)
def forward_past_wrapper(code: Reading) -> Iterator[Place]:
    if not wraps_ddp(code):
        return
    for call in code.calls:
        if not _is_inner(code, call.func, call) or _without_gradients(code, call):
            continue
        scope = code.scope_of(call)
        derived = _derived(code, call)
        later = (one for one in calls_in(*scope.body) if is_backward(one) and one.lineno >= call.lineno)
        for backward in later:
            used = names_in(backward) | {dotted(backward.func).removesuffix(".backward")}
            if used & derived or any(node is call for node in ast.walk(backward)):
                yield Place(
                    call,
                    f"the loss of backward (line {backward.lineno}) comes from {dotted(call.func)}(...), past DDP",
                )
                break


def _is_inner(code: Reading, function: ast.expr, call: ast.Call) -> bool:
    if isinstance(function, ast.Attribute) and function.attr == "module":
        return True
    values = (
        [one.value for one in code.assigned(function) if one.scope is code.scope_of(call)] if dotted(function) else []
    )
    return bool(values) and all(
        isinstance(value, ast.Attribute) and value.attr == "module" and is_ddp(code, value.value) for value in values
    )


def _without_gradients(code: Reading, call: ast.Call) -> bool:
    blocks = (around for around, _ in code.within_scope(call) if isinstance(around, ast.With))
    contexts = (code.last_name(item.context_expr) for block in blocks for item in block.items)
    return any(context in ("no_grad", "inference_mode", "set_grad_enabled") for context in contexts)


def _derived(code: Reading, call: ast.Call) -> set[str]:
    """The names that hold what was computed from a call's result, until they get another value."""
    start = code.statement_of(call)
    derived = set(_targets(start)) if isinstance(start, ast.Assign) else set()
    for node in body_of(code.scope_of(call)):
        if isinstance(node, ast.Assign) and node.lineno > start.lineno:
            derived = derived | set(_targets(node)) if names_in(node.value) & derived else derived - set(_targets(node))
        elif isinstance(node, ast.AugAssign) and node.lineno > start.lineno and names_in(node.value) & derived:
            derived |= set(targets_in(node.target))
    return derived


@rule(
    "ST307",
    "no-sync-around-backward",
    why="DDP decides in its forward whether the next backward reduces; no_sync() around backward alone comes too late.",
    fix="Put forward and backward into the same no_sync() block.",
)
def no_sync_around_backward(code: Reading) -> Iterator[Place]:
    for block in code.nodes:
        if not isinstance(block, ast.With) or not any(_is_no_sync(item.context_expr) for item in block.items):
            continue
        backwards = [call for call in calls_in(*block.body) if is_backward(call)]
        others = [
            call
            for call in calls_in(*block.body)
            if call not in backwards and not any(call in ast.walk(one) for one in backwards)
        ]
        plain = [call for call in backwards if dotted(call.func)]
        if plain and not others and not any(isinstance(node, ast.Assign) for node in walk(*block.body)):
            yield Place(plain[0], f"{dotted(plain[0].func)} is in a no_sync() block, and its forward is not")


def _is_no_sync(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and isinstance(context.func, ast.Attribute) and context.func.attr == "no_sync"


@rule(
    "ST308",
    "static-graph-and-unused",
    why="static_graph notes in the first step which parameters are used and takes it for all steps; "
    "find_unused_parameters, which says that they change, is not heeded.",
    fix="Choose one: static_graph where all steps use the same parameters, find_unused_parameters where they change.",
)
def static_graph_and_unused(code: Reading) -> Iterator[Place]:
    for call in code.calls:
        both = all(is_constant(keyword(call, name), True) for name in ("static_graph", "find_unused_parameters"))
        if both and is_ddp(code, call):
            yield Place(call, "static_graph=True and find_unused_parameters=True")


@rule(
    "ST309",
    "zero-term-without-gradient",
    why="What is detached has no gradient at all, so the parameters in this term stay unused, and DDP waits for "
    "them as before.",
    fix="Leave detach() out: loss + 0.0 * sum(p.sum() for p in model.parameters()) gives each a gradient of zero.",
)
def zero_term_without_gradient(code: Reading) -> Iterator[Place]:
    if not is_distributed(code):
        return
    for node in code.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            zero, other = (node.left, node.right) if _is_zero(node.left) else (node.right, node.left)
            if _is_zero(zero) and _detaches(code, other) and _flows_into_loss(code, node):
                yield Place(node, "a term times 0 that is detached adds nothing to any gradient")
        elif isinstance(node, ast.Call) and is_backward(node) and isinstance(node.func, ast.Attribute):
            loss = node.func.value
            here = (
                [one for one in code.assigned(loss) if one.scope is code.scope_of(node)]
                if isinstance(loss, ast.Name)
                else []
            )
            if here and all(isinstance(one.value, ast.Call) and code.last_name(one.value) == "detach" for one in here):
                yield Place(node, f"backward of {dotted(loss)}, which is detached (line {here[0].statement.lineno})")


def _is_zero(node: ast.AST) -> bool:
    return is_constant(node, 0) or is_constant(node, 0.0)


def _detaches(code: Reading, node: ast.AST) -> bool:
    return any(code.last_name(call) == "detach" for call in ast.walk(node) if isinstance(call, ast.Call))


def _flows_into_loss(code: Reading, node: ast.AST) -> bool:
    statement = code.statement_of(node)
    names = _targets(statement) if isinstance(statement, ast.Assign) else []
    added = isinstance(statement, ast.AugAssign)
    return (
        added
        or any("loss" in name.lower() for name in names)
        or any(isinstance(around, ast.Call) and is_backward(around) for around, _ in code.within_scope(node))
    )


@rule(
    "ST310",
    "static-graph-and-no-sync",
    why="A static graph learns from its first backward what to expect; under no_sync() that fails with an internal "
    "error, or later windows are not reduced.",
    fix="Leave static_graph out where gradients are accumulated under no_sync().",
)
def static_graph_and_no_sync(code: Reading) -> Iterator[Place]:
    for call in code.calls:
        values = [one.value for one in code.assigned(call.func.value)] if isinstance(call.func, ast.Attribute) else []
        for wrap in (value for value in values if isinstance(value, ast.Call) and is_ddp(code, value)):
            if _is_no_sync(call) and is_constant(keyword(wrap, "static_graph"), True):
                yield Place(call, f"{dotted(call.func)} of a DDP model with static_graph=True (line {wrap.lineno})")
