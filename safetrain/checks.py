"""Checks of config values, and their messages: the key, the value, what is allowed, the nearest valid name."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from safetrain.catalog import groups
from safetrain.errors import ConfigError

T = TypeVar("T")
_OTHER_NAMES = {"gpu": "cuda"}  # by its letters it is nearer to cpu


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """``" Did you mean x?"``, or an empty string where nothing is near."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f" Did you mean {match[0]}?" if match else ""


def unknown_key(where: str, name: str, valid: Iterable[str], asked: str = "") -> ConfigError:
    """The error for a key that is not there; ``asked`` is how it was asked for, if more is known than the key."""
    names = sorted(valid)
    allowed = f" Allowed: {', '.join(names)}." if names else ""
    key = asked or join_key(where, name)
    return ConfigError(f"{key}: no such key.{as_group(*key.split('=', 1)) or nearest(name, names)}{allowed}")


def as_group(key: str, value: object = None) -> str:
    """``" Did you mean policy/skip=partial?"`` for the key ``policy.skip``: a group is written with slashes."""
    group = key.replace(".", "/")
    if group == key or not isinstance(value, str) or group not in groups():
        return ""
    return f" Did you mean {group}={value}?"


def join_key(where: str, name: str) -> str:
    """``where.name``, or ``name`` at the top."""
    return f"{where}.{name}" if where else name


def check_keys(node: object, where: str = "") -> None:
    """Every key below ``node`` is text.

    Raises:
        ConfigError: one is not, as ``on`` or ``no`` are not in YAML.
    """
    if isinstance(node, Mapping):
        for name, value in node.items():
            key = join_key(where, str(name))
            if not isinstance(name, str):
                raise ConfigError(
                    f"{key}: a key must be text, not {kind_of(name)}. YAML reads on, off, yes, no as such."
                )
            check_keys(value, key)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            check_keys(value, f"{where}[{index}]")


def check_types(section: Any, where: str) -> None:
    """Every field of a dataclass holds what its annotation says.

    Raises:
        ConfigError: one does not.
    """
    for name, hint in typing.get_type_hints(type(section)).items():
        value = getattr(section, name)
        if not _fits(value, hint):
            allowed = _literals(hint)
            if any(type(value) is type(one) for one in allowed):  # of the right kind, but none of those
                wrong = nearest(_OTHER_NAMES.get(str(value), str(value)), [str(one) for one in allowed])
                wrong = wrong and f".{wrong}"
            else:
                wrong = f", not {kind_of(value)}"
            raise ConfigError(f"{join_key(where, name)}={value!r}: must be {_describe(hint)}{wrong}")


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in get_args(hint))
    if origin is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in get_args(hint))
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _literals(hint: Any) -> list[object]:
    if get_origin(hint) in (Union, types.UnionType):
        return [value for member in get_args(hint) for value in _literals(member)]
    return list(get_args(hint)) if get_origin(hint) is Literal else []


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(member) for member in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def kind_of(value: object) -> str:
    """What a value is, in YAML's words."""
    return {
        int: "a whole number", float: "a fraction", bool: "true or false", str: "text", type(None): "null",
        dict: "a mapping", list: "a list",
    }.get(type(value), type(value).__name__)  # fmt: skip


def at_least(section: Any, where: str, least: int, *names: str) -> None:
    """These numbers, where given, are not below ``least``."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{join_key(where, name)}={value}: must be at least {least}")


def more_than_zero(section: Any, where: str, *names: str) -> None:
    """These numbers, where given, are above zero."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{join_key(where, name)}={value}: must be more than 0")


def parse_section(cls: type[T], values: object, where: str) -> T:
    """A dataclass, and those in its fields, from plain data.

    Raises:
        ConfigError: a key is unknown or missing, or the class refuses a value.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}={values!r}: must be a mapping, not {kind_of(values)}")
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]  # every caller passes a dataclass
    for name in values:
        if name not in known:
            raise unknown_key(where, str(name), known)
    missing = [n for n, item in known.items() if n not in values and item.default is item.default_factory is MISSING]
    if missing:
        raise ConfigError(f"{join_key(where, missing[0])} is missing")
    hints = typing.get_type_hints(cls)
    parsed = {
        n: parse_section(hints[n], v, join_key(where, n)) if is_dataclass(hints[n]) else v for n, v in values.items()
    }
    return cls(**parsed)


def check_node(node: Mapping[str, Any] | None, where: str) -> None:
    """``node``, where given, names what to build."""
    if node is not None and not (isinstance(node, Mapping) and isinstance(node.get("_target_"), str)):
        example = f", such as\n  {where}: {{_target_: package.module.Name, argument: value}}"
        group = as_group(where, node)
        hint = f".{group}" if group else example
        raise ConfigError(f"{where}={node!r}: must be a mapping with a _target_ that names what to build{hint}")


def check_nodes(nodes: Mapping[str, Any] | None, where: str) -> None:
    """``nodes``, where given, is one node, or a mapping from names to nodes."""
    if nodes is None or "_target_" in nodes:
        return check_node(nodes, where)
    for name, node in nodes.items():
        check_node(node, f"{where}.{name}")
    return None
