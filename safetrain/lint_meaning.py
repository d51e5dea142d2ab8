"""What code means in distributed training: a rank, a condition on it, a call that all ranks must make, a DDP model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from safetrain.lint_reading import FunctionNode, Reading, body_of, calls_in, dotted, in_else, is_constant, keyword

MAIN, OTHERS, SOME = "main", "others", "some"
"""Which ranks a condition lets through: rank 0, all but rank 0, or others that are not all."""

_FLIPPED = {MAIN: OTHERS, OTHERS: MAIN, SOME: SOME}
_RANK = re.compile(
    r"((global|local|world|ddp|dist|my|node|proc|process|dp|ddp_local|torch)_?)?rank|(local_)?process_index", re.I
)
_RANK_CALL = re.compile(r"get_(\w+_)?rank|((global|local|world|dist)_)?rank")
_RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "GLOBAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
})  # fmt: skip
_MAIN = re.compile(
    r"(is_|on_|am_)?(local_|global_|world_)?(main|master|chief|primary|leader|process_zero|rank_?(zero|0)|global_zero)"
    r"(_?(proc|process|rank|node|worker))?(_only)?",
    re.I,
)
_MAIN_DECORATOR = re.compile(
    r"(rank_?(zero|0)|(on_)?(main|master)(_process)?|main_process)(_only)?|only_(main|rank_?zero).*"
)
_ABOUT_RANK = re.compile(r"rank|main|master|chief|primary|zero|leader|process_index|gpu", re.I)

_TORCH_COLLECTIVES = frozenset({
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "new_group", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list",
})  # fmt: skip
_SAVED_BY_ALL = frozenset({"async_save", "load", "load_state_dict", "save", "save_state_dict"})
_OF_ACCELERATOR = frozenset({
    "backward", "gather", "gather_for_metrics", "pad_across_processes", "reduce", "save_state", "wait_for_everyone",
})  # fmt: skip
_OF_FABRIC = frozenset({"all_gather", "all_reduce", "backward", "barrier", "broadcast", "save"})
_OF_COMM = frozenset({"agree", "barrier", "broadcast", "gather", "rank_zero", "sum_vector"})
_OF_TRAINER = frozenset({"agree", "rank_zero"})
_OF_ENGINE = frozenset({"backward", "load_checkpoint", "save_checkpoint", "step"})
_WRAPPERS = ("DistributedDataParallel", "torch.nn.parallel.DDP")
_LIMIT = 6  # how far one name leads to another


def is_distributed(code: Reading) -> bool:
    """Whether the file has to do with more than one process at all."""
    return code.mentions(
        "torch.distributed", "torch.nn.parallel", "apex.parallel", "accelerate", "lightning", "pytorch_lightning",
        "deepspeed", "horovod",
    )  # fmt: skip


def wraps_ddp(code: Reading) -> bool:
    """Whether the file wraps a model in DDP itself."""
    return any(is_ddp(code, call) for call in code.calls)


def is_ddp(code: Reading, node: ast.AST, depth: int = 0) -> bool:
    """Whether an expression is a model wrapped in DDP."""
    if depth > _LIMIT:
        return False
    if isinstance(node, ast.IfExp):
        return is_ddp(code, node.body, depth + 1) or is_ddp(code, node.orelse, depth + 1)
    if isinstance(node, ast.Call):
        if code.name(node).endswith(_WRAPPERS):
            return True
        compiled = code.name(node) == "torch.compile" and bool(node.args)
        return compiled and is_ddp(code, node.args[0], depth + 1)
    return any(is_ddp(code, one.value, depth + 1) for one in code.assigned(node)) if dotted(node) else False


def made_by(code: Reading, node: ast.AST, *makers: str) -> bool:
    """Whether a name was assigned what one of these functions or classes returned."""
    values = (one.value for one in code.assigned(node))
    return any(isinstance(value, ast.Call) and code.name(value).endswith(makers) for value in values)


def is_rank(code: Reading, node: ast.AST, depth: int = 0) -> bool:
    """Whether an expression is a rank's number."""
    if depth > _LIMIT:
        return False
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod | ast.FloorDiv) and is_rank(code, node.left, depth + 1)
    if variable_read(code, node) in _RANK_VARIABLES:
        return True
    if isinstance(node, ast.Call):
        if code.name(node) == "int" and node.args:
            return is_rank(code, node.args[0], depth + 1)
        return bool(_RANK_CALL.fullmatch(code.last_name(node)))
    name = dotted(node)
    if _RANK.fullmatch(name.rpartition(".")[2]):
        return True
    return bool(name) and any(one.whole and is_rank(code, one.value, depth + 1) for one in code.assigned(node))


def variable_read(code: Reading, node: ast.AST) -> str:
    """The environment variable that an expression reads: ``os.environ["RANK"]``, ``.get``, ``os.getenv``."""
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and code.name(node.value) == "os.environ":
        key = node.slice
    elif isinstance(node, ast.Call) and code.name(node) in ("os.environ.get", "os.getenv") and node.args:
        key = node.args[0]
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def side(code: Reading, test: ast.AST, depth: int = 0) -> str | None:
    """Which ranks a condition lets through; None where it does not depend on the rank, or nobody can tell."""
    if depth > _LIMIT:
        return None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = side(code, test.operand, depth + 1)
        return _FLIPPED[found] if found else None
    if isinstance(test, ast.BoolOp):
        return next(filter(None, (side(code, part, depth + 1) for part in test.values)), None)
    if isinstance(test, ast.Compare):
        return _compared(code, test) if len(test.ops) == 1 else None
    if is_rank(code, test):
        return OTHERS
    name = code.last_name(test)
    if _MAIN.fullmatch(name):
        return MAIN
    if isinstance(test, ast.Call) and (function := code.function(test)) is not None:
        returned = [node.value for node in body_of(function) if isinstance(node, ast.Return) and node.value is not None]
        return side(code, returned[0], depth + 1) if len(returned) == 1 else None
    if dotted(test):
        return next(filter(None, (side(code, one.value, depth + 1) for one in code.assigned(test))), None)
    return None


def _compared(code: Reading, test: ast.Compare) -> str | None:
    left, operator, right = test.left, test.ops[0], test.comparators[0]
    if is_rank(code, right) and not is_rank(code, left):
        left, right = right, left
        if not isinstance(operator, ast.Eq | ast.NotEq):
            return None
    if not is_rank(code, left):
        return None
    if isinstance(operator, ast.In | ast.NotIn):
        if not isinstance(right, ast.Tuple | ast.List | ast.Set):
            return SOME
        if not any(_number(one) == 0 for one in right.elts):
            return None if all((number := _number(one)) is not None and number < 0 for one in right.elts) else SOME
        return MAIN if isinstance(operator, ast.In) else OTHERS
    number = _number(right)
    if number is None:
        return SOME if isinstance(operator, ast.Eq | ast.NotEq) and _is_last(right) else None
    if number < 0 or (number == 0 and isinstance(operator, ast.GtE | ast.Lt)):
        return None  # rank -1 is how many scripts say that there is only one process
    first = number == 0 if isinstance(operator, ast.Eq | ast.NotEq | ast.Gt | ast.LtE) else number == 1
    if not first:
        return SOME
    return MAIN if isinstance(operator, ast.Eq | ast.LtE | ast.Lt) else OTHERS


def _is_last(node: ast.AST) -> bool:
    """``world_size - 1``."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and is_constant(node.right, 1)


def _number(node: ast.AST) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _number(node.operand)
        return None if number is None else -number
    if isinstance(node, ast.Constant) and isinstance(node.value, int | str) and str(node.value).isdigit():
        return int(node.value)
    return None


def guards(code: Reading, node: ast.AST) -> Iterator[tuple[ast.If | ast.IfExp | None, str]]:
    """The conditions on the rank under which a node is reached, from the innermost outwards: ``(if, side)``; with None
    for a decorator that lets only rank 0 in."""
    for around, child in code.within_scope(node):
        if isinstance(around, ast.If | ast.IfExp) and child is not around.test and (found := side(code, around.test)):
            yield around, _FLIPPED[found] if in_else(around, child) else found
    scope = code.scope_of(node)
    if isinstance(scope, FunctionNode) and any(
        _MAIN_DECORATOR.fullmatch(code.last_name(decorator)) for decorator in scope.decorator_list
    ):
        yield None, MAIN


def may_be_guarded(code: Reading, node: ast.AST) -> bool:
    """Whether anything around a node, or a way out before it, looks as if it asked for the rank."""
    if any(True for _ in guards(code, node)):
        return True
    for around, child in code.within_scope(node):
        if isinstance(around, ast.If | ast.IfExp | ast.While) and child is not around.test and _asks(code, around.test):
            return True
    scope = code.scope_of(node)
    return any(
        isinstance(one, ast.If) and one.lineno < node.lineno and leaves(code, one.body) and _asks(code, one.test)  # type: ignore[attr-defined]
        for one in body_of(scope)
    )


def _asks(code: Reading, test: ast.AST) -> bool:
    names = [dotted(node) for node in ast.walk(test)]
    return side(code, test) is not None or any(_ABOUT_RANK.search(name) for name in names)


def leaves(code: Reading, block: list[ast.stmt]) -> bool:
    """Whether a block's last statement leaves it: return, raise, continue, break or the process's end."""
    last = block[-1] if block else None
    if isinstance(last, ast.If) and last.orelse:
        return leaves(code, last.body) and leaves(code, last.orelse)
    return isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break) or ends_process(code, last)


def ends_process(code: Reading, statement: ast.stmt | None) -> bool:
    """``sys.exit()`` and its like."""
    return isinstance(statement, ast.Expr) and code.name(statement.value) in (
        "sys.exit",
        "exit",
        "quit",
        "os._exit",
        "os.abort",
    )


def collective(code: Reading, call: ast.Call) -> str:
    """What a call that all ranks must make is called, as the user writes it; empty for any other, and where it names a
    group: which ranks are in it can't be seen."""
    name, last = code.name(call), code.last_name(call)
    if not _in_a_group(call) and _is_collective(code, call, name, last):
        return dotted(call.func) or last
    return ""


def _is_collective(code: Reading, call: ast.Call, name: str, last: str) -> bool:
    where = name.rpartition(".")[0]
    if where in ("torch.distributed", "torch.distributed.distributed_c10d", "deepspeed.comm"):
        return last in _TORCH_COLLECTIVES
    if where.startswith("torch.distributed.checkpoint"):
        return last in _SAVED_BY_ALL
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    owners = code.last_name(owner) if dotted(owner) else ""
    if owners == "accelerator" or made_by(code, owner, "accelerate.Accelerator"):
        return last in _OF_ACCELERATOR
    if owners == "fabric" or made_by(code, owner, ".Fabric"):
        return last in _OF_FABRIC
    if made_by(code, owner, "deepspeed.initialize"):
        return last in _OF_ENGINE
    if code.mentions("safetrain"):
        return (owners == "comm" and last in _OF_COMM) or (owners in ("self", "trainer") and last in _OF_TRAINER)
    if code.mentions("lightning", "pytorch_lightning"):
        synchronised = last in ("log", "log_dict") and is_constant(keyword(call, "sync_dist"), True)
        return (
            synchronised
            or (owners == "trainer" and last == "save_checkpoint")
            or (owners == "strategy" and last == "barrier")
        )
    return False


def _in_a_group(call: ast.Call) -> bool:
    given = [*call.args, *(one.value for one in call.keywords if one.arg in ("group", "process_group"))]
    names = [dotted(one).lower() for one in given]
    return any(re.search(r"group|(^|[._])pg($|_)", name) and not name.endswith("group.world") for name in names)


def collective_inside(code: Reading, function: FunctionNode) -> tuple[str, ast.Call] | None:
    """The first collective that a function of this file makes on every rank that calls it, also by another function."""
    key = ("collective_inside", function)
    if key not in code.remembered:
        code.remembered[key] = None  # while it is looked for: functions may call each other
        code.remembered[key] = _look_inside(code, function)
    found = code.remembered[key]
    return found if isinstance(found, tuple) else None


def _look_inside(code: Reading, function: FunctionNode) -> tuple[str, ast.Call] | None:
    for call in calls_in(*function.body):
        name = collective(code, call)
        inner = None if name else code.function(call)
        found = (name, call) if name else collective_inside(code, inner) if inner is not None else None
        if found is not None and not any(True for _ in guards(code, call)):
            return found
    return None


def is_backward(call: ast.Call) -> bool:
    """``loss.backward()``, ``accelerator.backward(loss)``; that of distributed autograd is no business of DDP."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return False
    return "autograd" not in dotted(call.func.value)
