"""Every ``_target_`` of a config, imported and held against its signature before a process starts."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Union

from safetrain.checks import join_key, nearest
from safetrain.errors import ConfigError

_HYDRA_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})
_NUMBERS = {int: "a whole number (int)", float: "a number (float)", bool: "true or false (bool)"}
_SAME_NAME = (
    "accelerate", "albumentations", "datasets", "diffusers", "einops", "h5py", "kornia", "lightning", "monai", "pandas",
    "peft", "pyarrow", "safetensors", "scipy", "timm", "tokenizers", "torchaudio", "torchdata", "torchmetrics",
    "torchvision", "transformers", "webdataset", "zarr",
)  # fmt: skip
_LIBRARIES = {name: name for name in _SAME_NAME} | {
    "PIL": "pillow", "cv2": "opencv-python", "pytorch_lightning": "pytorch-lightning", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "torch_geometric": "torch_geometric", "yaml": "PyYAML",
}  # fmt: skip
"""What provides a module that recipes ask for, by the module's name."""
_NEAR_TO_ANY_MODULE = 0.8  # of the hundreds that Python can import one is always a little like it


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
    _check_texts(node, key, found, signature)


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


def _check_texts(node: Mapping[str, Any], key: str, found: Callable[..., Any], signature: inspect.Signature) -> None:
    """No text where ``found`` takes a number only. No other annotation is judged: a text for a Path is fine."""
    for name, value in node.items():
        parameter = signature.parameters.get(str(name))
        if name in _HYDRA_KEYS or not isinstance(value, str) or parameter is None or isinstance(parameter.default, str):
            continue
        if takes := _numbers_taken(found, parameter):
            what = str(node["_target_"]).rpartition(".")[2]
            raise ConfigError(f"{key}.{name}={value!r}: {what} takes {takes} here")


def _numbers_taken(found: Callable[..., Any], parameter: inspect.Parameter) -> str:
    """Which numbers a parameter takes, in words; empty where it takes anything else, or doesn't say."""
    if parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
        return ""
    written = getattr(found, "__init__") if isinstance(found, type) else found  # noqa: B009  # mypy: of which class?
    function = inspect.unwrap(written)
    said = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        hint = typing.get_type_hints(said, getattr(function, "__globals__", {}))[parameter.name]
    except (NameError, AttributeError, TypeError, SyntaxError):  # imported for type checkers only, or no type at all
        return ""
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    members = list(typing.get_args(hint)) if is_union else [hint]
    others = [member for member in members if member is not type(None) and not _is_tensor(member)]
    numbers = [words for kind, words in _NUMBERS.items() if kind in others]
    if len(numbers) < len(others) or members == [type(None)]:
        return ""
    return " or ".join([*(numbers or ["a tensor"]), *(["null"] if type(None) in members else [])])


def _is_tensor(hint: object) -> bool:
    return isinstance(hint, type) and (hint.__module__, hint.__name__) == ("torch", "Tensor")  # without torch's import


def takes_argument(target: str, key: str, name: str) -> tuple[bool, bool]:
    """Whether ``target`` has a parameter of that name, and whether it takes a name that it does not list.

    Raises:
        ConfigError: there is no such target, or importing it fails.
    """
    try:
        parameters = inspect.signature(import_target(target, key)).parameters
    except (TypeError, ValueError):  # no function, or one of a C extension
        return False, False
    return name in parameters, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def import_target(target: str, key: str) -> Any:
    """What ``target``, a dotted name at ``key`` of the config, means.

    Raises:
        ConfigError: there is no such thing, or importing it fails.
    """
    where = f"{key}._target_={target}"
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: must be package.module.Name")
    found: Any = _import_module(parts[0], where, None)
    for depth, part in enumerate(parts[1:], start=1):
        if not hasattr(found, part) and isinstance(found, ModuleType):
            _import_module(".".join(parts[: depth + 1]), where, functools.partial(_names_in, found))
        if not hasattr(found, part):
            raise ConfigError(f"{where}: {'.'.join(parts[:depth])} has no {part}.{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def _import_module(name: str, where: str, siblings: Callable[[], Iterable[str]] | None) -> ModuleType:
    """``siblings``: the names beside it; None at the top."""
    parent, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name and not str(error).endswith("is not a package"):
            hint = f"; {install}" if (install := _install(str(error.name).partition(".")[0])) else ""
            raise ConfigError(f"{where}: importing {name} failed at {_place(error)}: {error}{hint}") from error
        if siblings is None:
            raise ConfigError(f"{where}: there is no module {last}{_other_module(last)}") from error
        raise ConfigError(f"{where}: {parent} has no {last}.{nearest(last, siblings())}{_shadowed(name)}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        raise ConfigError(
            f"{where}: importing {name} failed at {_place(error)}: {type(error).__name__}: {error}"
        ) from error


def _names_in(module: ModuleType) -> list[str]:
    paths = getattr(module, "__path__", None)
    return [*dir(module), *([m.name for m in pkgutil.iter_modules(paths)] if paths else [])]


def _other_module(name: str) -> str:
    """One of the user's own with a name like it, or any with nearly that name; else where it was looked for."""
    here = Path.cwd()
    own = nearest(name, [module.name for module in pkgutil.iter_modules([str(here)])])
    install = _install(name)
    near = own or install or nearest(name, [module.name for module in pkgutil.iter_modules()], _NEAR_TO_ANY_MODULE)
    if near and near != install:
        return f".{near}"
    return f": no {name}.py in {here}; run from its folder{f', or {install}' if install else ''}"


def _install(name: str) -> str:
    """How to get a library of the field. Of any other name it is not known who owns it on a package index."""
    package = _LIBRARIES.get(name, "")
    return f"install it (pip install {package})" if package else ""


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
