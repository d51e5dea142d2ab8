"""Rules about the loss scale of mixed precision (ST301-ST303)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from safetrain.lint_meaning import is_backward, made_by
from safetrain.lint_reading import Reading, calls_in, dotted, walk
from safetrain.lint_rule import Place, rule

_CLIPS = (
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grad.clip_grad_norm_",
)


@rule(
    "ST301",
    "clip-before-unscale",
    why="The gradients still carry the loss scale (65,536 at first), so clipping cuts them to almost nothing.",
    fix="Call scaler.unscale_(optimizer) after backward and before clipping.",
)
def clip_before_unscale(code: Reading) -> Iterator[Place]:
    for clip in code.calls:
        if code.name(clip) not in _CLIPS:
            continue
        calls = [call for call in calls_in(*code.scope_of(clip).body) if not code.exclude_each_other(call, clip)]
        before = [call for call in calls if call.lineno < clip.lineno]
        scaled = [call for call in before if is_backward(call) and _is_scaled(code, call)]
        steps = any(call.lineno > clip.lineno and _of_scaler(code, call, "step") for call in calls)
        unscaled = any(_of_scaler(code, call, "unscale_") for call in before)
        if scaled and steps and not unscaled:
            yield Place(
                clip, f"{dotted(clip.func)} on gradients that are still scaled (backward in line {scaled[-1].lineno})"
            )


def _is_scaled(code: Reading, backward: ast.Call) -> bool:
    assert isinstance(backward.func, ast.Attribute)
    loss = backward.func.value
    values = [loss, *(one.value for one in code.assigned(loss) if one.scope is code.scope_of(backward))]
    return any(isinstance(value, ast.Call) and _of_scaler(code, value, "scale") for value in values)


def _of_scaler(code: Reading, call: ast.Call, method: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == method and _is_scaler(code, call.func.value)


def _is_scaler(code: Reading, node: ast.AST) -> bool:
    return made_by(code, node, "GradScaler") or "scaler" in dotted(node).rpartition(".")[2].lower()


@rule(
    "ST302",
    "scaler-not-updated",
    why="The scaler remembers that this optimizer was unscaled or stepped: the next step is an error, and the "
    "scale never adapts.",
    fix="Call scaler.update() once at the end of every step, also where the step itself is skipped.",
)
def scaler_not_updated(code: Reading) -> Iterator[Place]:
    if not any(code.name(call).endswith("GradScaler") for call in code.calls):
        return
    if not any(_of_scaler(code, call, "update") for call in code.calls):
        yield from (
            Place(call, f"{dotted(call.func)} without update") for call in code.calls if _of_scaler(code, call, "step")
        )
        return
    for unscale in (call for call in code.calls if _of_scaler(code, call, "unscale_")):
        loop = code.loop_of(unscale)
        following = code.after(code.statement_of(unscale), until=loop) if loop is not None else []
        for leave in walk(*following):
            if (
                isinstance(leave, ast.Continue)
                and code.loop_of(leave) is loop
                and _skips_update(code, leave, unscale, loop)
            ):
                yield Place(leave, f"continue after unscale_ (line {unscale.lineno}), past update")


def _skips_update(code: Reading, leave: ast.Continue, unscale: ast.Call, loop: ast.AST | None) -> bool:
    updates = [call.lineno for call in code.calls if _of_scaler(code, call, "update") and code.loop_of(call) is loop]
    done = any(unscale.lineno < line < leave.lineno for line in updates)
    return not done and any(line > leave.lineno for line in updates)


@rule(
    "ST303",
    "scaler-not-saved",
    why="After a resume the scale starts again at its initial value, so the first steps are dropped and the run "
    "is another one.",
    fix="Save scaler.state_dict() beside the optimizer's, and load both.",
)
def scaler_not_saved(code: Reading) -> Iterator[Place]:
    if not any(code.name(call).endswith("GradScaler") for call in code.calls):
        return
    states = [call for call in code.calls if isinstance(call.func, ast.Attribute) and call.func.attr == "state_dict"]
    if any(isinstance(call.func, ast.Attribute) and _is_scaler(code, call.func.value) for call in states):
        return
    for call in states:
        of_optimizer = "optim" in dotted(call.func).rpartition(".state_dict")[0].rpartition(".")[2].lower()
        in_dict = any(isinstance(around, ast.Dict) for around, _ in code.within_scope(call))
        if of_optimizer and in_dict:
            yield Place(call, f"{dotted(call.func)} is saved, the scaler's state is not")
            return
