"""Environment variables of the ranks: what holds where the command line, the shell and a template disagree.

The command line (``env.NAME=value``) wins over the user's shell, and the shell over a template or a recipe: what was
typed for this run, then what was set for this machine, then what somebody wrote for machines like it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetrain.variables import comes_too_late, is_of_communication, matters, renamed, renaming

COMMAND_LINE, SHELL, RECIPE = "command line", "your shell", "the recipe"
_SET_BY_TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@dataclass(frozen=True)
class Variable:
    """A variable of the ranks' environment.

    Attributes:
        source: who set it: COMMAND_LINE, SHELL, RECIPE, or a template such as ``env=debug``.
        instead_of: what a template or a recipe says, where the shell says something else.
    """

    name: str
    value: str
    source: str
    instead_of: str | None = None


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables``; afterwards each is again what it was, or unset."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def shell() -> dict[str, str]:
    """The environment of this process, without what torchrun has put there."""
    by_torchrun = _SET_BY_TORCHRUN.items() if "TORCHELASTIC_RUN_ID" in os.environ else ()
    return {name: value for name, value in os.environ.items() if (name, value) not in by_torchrun}


def settle(env: Mapping[str, Any], sources: Mapping[str, str], shell: Mapping[str, str]) -> list[Variable]:
    """What holds of ``env``, and the variables of the shell that matter. ``sources``: who wrote what is in ``env``."""
    found = []
    for name, value in env.items():
        if value is None:
            continue
        if name in shell and sources[name] != COMMAND_LINE:
            found.append(Variable(name, shell[name], SHELL, None if shell[name] == str(value) else str(value)))
        else:
            found.append(Variable(name, str(value), sources[name]))
    named = {variable.name for variable in found}
    return found + [
        Variable(name, value, SHELL) for name, value in sorted(shell.items()) if matters(name) and name not in named
    ]


def apply(env: Mapping[str, Any], on_command_line: Collection[str]) -> None:
    """Set ``env``, which rank 0 settled, in this process; what this host's shell says stays, as it does there."""
    own = shell()
    os.environ.update({n: str(value) for n, value in env.items() if n in on_command_line or n not in own})


def announce(variables: Sequence[Variable], run_dir: Path, *, started: bool = False) -> None:
    """Say what holds and what is wrong with it, and save it in ``run_dir``.

    ``started``: another launcher has started the ranks, without these variables.
    """
    lines = [f"{variable.name}: {json.dumps(variable.value)}  # {variable.source}\n" for variable in variables]
    (run_dir / "environment.yaml").write_text("".join(lines))
    if line := _told(variables):
        print(line, flush=True)
    for text in _warnings(variables, started):
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _told(variables: Sequence[Variable]) -> str:
    """One line; empty where neither the config nor the shell says anything about how ranks talk."""
    by_source: dict[str, list[str]] = {}
    for variable in variables:
        if variable.source == SHELL and variable.instead_of is None and not is_of_communication(variable.name):
            continue
        instead = "" if variable.instead_of is None else f" instead of {variable.instead_of}"
        by_source.setdefault(variable.source, []).append(f"{variable.name}={variable.value}{instead}")
    parts = [f"{', '.join(said)} ({source})" for source, said in by_source.items()]
    return f"environment: {'; '.join(parts)}" if parts else ""


def _warnings(variables: Sequence[Variable], started: bool) -> list[str]:
    said = (variable.name for variable in variables)
    found = [renaming(old) for old in renamed(said)]
    late = [f"{v.name}={v.value}" for v in variables if v.source != SHELL and comes_too_late(v.name)]
    if started and late:
        found.append(
            f"{' '.join(late)}: too late, the ranks run already. Set it in the shell, before the command that starts "
            "them."
        )
    return found
