"""Every ``_target_`` of a config, imported and held against its signature before a process starts."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from safetrain.checks import join_key, nearest
from safetrain.errors import ConfigError

_HYDRA_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})


def check_targets(node: object, key: str = "") -> None:
    """Import each target below ``node`` and check that it takes the arguments that the config gives it.

    Raises:
        ConfigError: names the key, the target, and the nearest name that there is.
    """
    if isinstance(node, Mapping):
        if "_target_" in node:
            _check_node(node, key)
        for name, value in node.items():
            check_targets(value, join_key(key, str(name)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            check_targets(value, f"{key}[{index}]")


def _check_node(node: Mapping[str, Any], key: str) -> None:
    target = str(node["_target_"])
    found = import_target(target, key)
    if not callable(found):
        raise ConfigError(f"{key}._target_={target}: is {type(found).__name__}, not something to call")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some callables of C extensions have none
        return
    _check_arguments(node, key, target, signature)


def _check_arguments(node: Mapping[str, Any], key: str, target: str, signature: inspect.Signature) -> None:
    given = [str(name) for name in node if name not in _HYDRA_KEYS]
    takes = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in given:
        if name not in takes and not takes_any:
            listed = f" It takes: {', '.join(takes)}." if takes else " It takes none."
            raise ConfigError(f"{key}.{name}: {target} takes no such argument.{nearest(name, takes)}{listed}")
    if node.get("_partial_") or key == "trainer":  # the rest is given later: by the loop, and by worker.build
        return
    positional = node.get("_args_", ())
    try:
        signature.bind(*positional, **{name: node[name] for name in given})
    except TypeError as error:
        hint = "What is given later, as an optimizer's parameters are, needs _partial_: true."
        raise ConfigError(f"{key}: {target} can't be called with what the config gives it: {error}. {hint}") from error


def import_target(target: str, key: str) -> Any:
    """What ``target``, a dotted name at ``key`` of the config, means.

    Raises:
        ConfigError: there is no such thing, or importing it fails.
    """
    where = f"{key}._target_={target}"
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: must be package.module.Name")
    found: Any = _import_module(parts[0], where, _top_level_names)
    for depth, part in enumerate(parts[1:], start=1):
        if not hasattr(found, part) and isinstance(found, ModuleType):
            _import_module(".".join(parts[: depth + 1]), where, functools.partial(_names_in, found))
        if not hasattr(found, part):
            raise ConfigError(f"{where}: {'.'.join(parts[:depth])} has no {part}.{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def _import_module(name: str, where: str, siblings: Callable[[], Iterable[str]]) -> ModuleType:
    parent, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name and not str(error).endswith("is not a package"):
            raise ConfigError(f"{where}: importing {name} failed at {_place(error)}: {error}") from error
        what = f"{parent} has no {last}." if parent else f"there is no module {last}."
        raise ConfigError(f"{where}: {what}{nearest(last, siblings())}{_shadowed(name)}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        raise ConfigError(
            f"{where}: importing {name} failed at {_place(error)}: {type(error).__name__}: {error}"
        ) from error


def _names_in(module: ModuleType) -> list[str]:
    paths = getattr(module, "__path__", None)
    return [*dir(module), *([m.name for m in pkgutil.iter_modules(paths)] if paths else [])]


def _top_level_names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules()]


def _shadowed(name: str) -> str:
    """A hint where the user's own file lies in the current folder but Python's module of that name was imported."""
    top = name.partition(".")[0]
    own, imported = Path(f"{top}.py").resolve(), sys.modules.get(top)
    if imported is None or not own.exists() or str(own) == getattr(imported, "__file__", None):
        return ""
    return f" (Your {own.name} has the name of another module, {top}, which comes first: rename your file.)"


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    return f"{frames[-1].filename}:{frames[-1].lineno}"
