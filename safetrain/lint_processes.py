"""Rules about how ranks start, end, and read and write files (ST4xx)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from safetrain.lint_meaning import collective, is_rank, may_be_guarded, variable_read, wraps_ddp
from safetrain.lint_reading import FunctionNode, Reading, body_of, calls_in, dotted, keyword, names_in, targets_in, walk
from safetrain.lint_rule import Place, rule
from safetrain.variables import RENAMED

_SETS_VARIABLES = ("os.environ", "os.environ.setdefault", "os.environ.get", "os.environ.pop", "os.getenv", "os.putenv")
_ENDS_GROUP = "torch.distributed.destroy_process_group"
_DEPTH = 4


@rule(
    "ST401",
    "spawn-under-torchrun",
    why="torchrun has started the ranks already: each of them would start all ranks once more, on the same port.",
    fix="Choose one: start with torchrun and read LOCAL_RANK, or start with mp.spawn and take the rank that it passes.",
)
def spawn_under_torchrun(code: Reading) -> Iterator[Place]:
    reads = [node for node in code.nodes if variable_read(code, node) == "LOCAL_RANK" and not _is_stored(code, node)]
    if not reads or _sets_itself(code, "LOCAL_RANK"):
        return
    for call in code.calls:
        if code.name(call) not in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
            continue
        tests = [around.test for around, _ in code.within_scope(call) if isinstance(around, ast.If)]
        tests += [
            node.test for node in body_of(code.scope_of(call)) if isinstance(node, ast.If) and node.lineno < call.lineno
        ]
        asked = any(re.search("environ|getenv|RANK|torchrun|elastic|launch", ast.unparse(test)) for test in tests)
        if not asked:
            line = min(getattr(node, "lineno", 0) for node in reads)
            yield Place(call, f"{dotted(call.func)} in a script that reads torchrun's LOCAL_RANK (line {line})")


def _is_stored(code: Reading, node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)


def _sets_itself(code: Reading, variable: str) -> bool:
    return any(variable_read(code, node) == variable and _is_stored(code, node) for node in code.nodes)


@rule(
    "ST402",
    "cleanup-in-finally",
    why="After a failure the peers are still in other calls, so the clean-up waits for them and hides the traceback.",
    fix="Destroy the group at the end of the good way only; a rank that fails should just end.",
)
def cleanup_in_finally(code: Reading) -> Iterator[Place]:
    for attempt in code.nodes:
        if isinstance(attempt, ast.Try):
            for call in calls_in(*attempt.finalbody):
                if name := _cleans_up(code, call):
                    yield Place(call, f"{name} in finally")
    for call in code.calls:
        if code.name(call) == "atexit.register" and call.args and code.name(call.args[0]) == _ENDS_GROUP:
            yield Place(call, "destroy_process_group at exit, also of a rank that failed")


def _cleans_up(code: Reading, call: ast.Call) -> str:
    """What a call does that needs the other ranks; also by a function of the file that does little else."""
    if code.name(call) == _ENDS_GROUP or collective(code, call):
        return dotted(call.func)
    function = code.function(call)
    inner = list(calls_in(*function.body)) if function is not None else []
    return dotted(call.func) if any(code.name(one) == _ENDS_GROUP for one in inner) else ""


@rule(
    "ST403",
    "save-on-every-rank",
    why="All ranks write the same file at once: it can be torn, and one rank may read what another is still writing.",
    fix="Save on rank 0 only; where others need the file next, let a barrier on all ranks follow.",
)
def save_on_every_rank(code: Reading) -> Iterator[Place]:
    if not wraps_ddp(code):
        return
    for call in code.calls:
        if (
            code.name(call) == "torch.save"
            and len(call.args) > 1
            and not _is_own_file(code, call)
            and _on_all(code, call)
        ):
            yield Place(call, "torch.save on every rank")


def _is_own_file(code: Reading, call: ast.Call) -> bool:
    """Whether the file's name says the rank, or it is no file but memory."""
    target = call.args[1]
    values = [target, *(one.value for one in code.assigned(target))]
    return any(
        is_rank(code, node)
        or "BytesIO" in dotted(node)
        or re.search(r"rank|buffer|stream", dotted(node), re.I) is not None
        for value in values
        for node in walk(value)
    )


def _on_all(code: Reading, node: ast.AST, depth: int = 0) -> bool:
    """Whether nothing on the way to a node asks for the rank; false where this file does not call the function."""
    if depth > _DEPTH or may_be_guarded(code, node):
        return False
    scope = code.scope_of(node)
    if not isinstance(scope, FunctionNode):
        return True
    if scope.decorator_list or re.search(r"master|main_process|rank|zero", scope.name, re.I):
        return False
    calls = [call for call in code.calls if code.last_name(call) == scope.name]
    if not calls:
        return scope.name == "main" or _is_spawned(code, scope)
    return any(_on_all(code, call, depth + 1) for call in calls if code.scope_of(call) is not scope)


def _is_spawned(code: Reading, function: FunctionNode) -> bool:
    spawns = (call for call in code.calls if code.name(call) == "torch.multiprocessing.spawn")
    return any(function.name in names_in(*call.args) for call in spawns)


@rule(
    "ST404",
    "load-onto-one-gpu",
    why="Tensors go back to the device that they were saved from, so every rank takes memory on the first GPU.",
    fix='Load with map_location="cpu"; load_state_dict copies to where the model is.',
)
def load_onto_one_gpu(code: Reading) -> Iterator[Place]:
    if not wraps_ddp(code):
        return
    for call in code.calls:
        given = (
            len(call.args) > 1
            or keyword(call, "map_location") is not None
            or any(one.arg is None for one in call.keywords)
        )
        if code.name(call) == "torch.load" and not given and not may_be_guarded(code, call) and _is_state(code, call):
            yield Place(call, "torch.load of a checkpoint without map_location, on every rank")


def _is_state(code: Reading, call: ast.Call) -> bool:
    """Whether what is loaded goes into ``load_state_dict``."""
    statement = code.statement_of(call)
    names = (
        {name for target in statement.targets for name in targets_in(target)}
        if isinstance(statement, ast.Assign)
        else set()
    )
    for other in calls_in(*code.scope_of(call).body):
        of_scaler = "scaler" in dotted(other.func).lower()  # a scaler's state is numbers, on no device
        if (
            code.last_name(other) == "load_state_dict"
            and not of_scaler
            and any(node is call or dotted(node) in names for one in other.args for node in ast.walk(one))
        ):
            return True
    return False


@rule(
    "ST405",
    "renamed-variable",
    why="torch reads this variable by another name now, so the old one is deprecated or does nothing.",
    fix="Use the name that begins with TORCH_NCCL_.",
)
def renamed_variable(code: Reading) -> Iterator[Place]:
    for node in code.nodes:
        key: ast.AST | None = None
        if isinstance(node, ast.Subscript) and code.name(node.value) == "os.environ":
            key = node.slice
        elif isinstance(node, ast.Call) and code.name(node) in _SETS_VARIABLES and node.args:
            key = node.args[0]
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value in RENAMED:
            yield Place(key, f"{key.value} is called {RENAMED[key.value]}")
