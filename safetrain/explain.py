"""Hydra's and OmegaConf's errors, told like our own: the key, the value, what is allowed, the nearest valid name."""

from __future__ import annotations

import re

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import MarkedYAMLError, YAMLError

from safetrain.catalog import groups
from safetrain.checks import nearest, unknown_key
from safetrain.errors import ConfigError
from safetrain.targets import takes_argument

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
"""What Hydra raises when a config cannot be composed or resolved."""
_BUILT = {"model": False, "data.train": False, "data.val": False, "optimizer": True, "scheduler": True}
"""Keys that a recipe may leave null, and whether what is there is ``_partial_``."""


def explain(error: Exception) -> ConfigError:
    """The ConfigError that says what ``error``, one of ``COMPOSITION_ERRORS``, means."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override}: can't be read as key=value. Quote what holds commas, brackets, spaces or equal signs, "
            """such as 'key="a=b"' or 'key=[1,2]'."""
        )
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(cause.parent_node, DictConfig):
        return _unknown_key(str(cause.full_key), cause.parent_node, _override(error))
    if isinstance(cause, MissingMandatoryValue):
        return _missing(str(cause.full_key))
    if isinstance(cause, InterpolationResolutionError):
        if missing := re.search(r"Missing mandatory value: (\S+)", str(cause)):  # OmegaConf keeps the key in words only
            return _missing(missing[1])
        return ConfigError(f"{cause.full_key}: {_first_line(cause)}")
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = ", ".join(text for text in (error.context, error.problem) if text)
        return ConfigError(f"{mark.name}, line {mark.line + 1}: is no YAML: {what}.")
    return ConfigError(_without_links(str(error) or str(cause)))


def check_package(config: DictConfig) -> None:
    """The recipe's keys stand at the top of ``config``.

    Raises:
        ConfigError: they don't, since its file does not say so.
    """
    if isinstance(below := config.get("recipe"), DictConfig) and below:
        raise ConfigError(
            f"the recipe's keys ({', '.join(map(str, below))}) came to lie below `recipe`, where nothing reads them: "
            "write `# @package _global_` as the first line of its file"
        )


def _unknown_key(key: str, node: DictConfig, asked: str) -> ConfigError:
    """``asked``: what the command line says, where the key stands there."""
    root = node._get_root()
    if isinstance(root, DictConfig):
        try:
            check_package(root)
        except ConfigError as error:
            return error
    parent, _, name = key.rpartition(".")
    names = [str(other) for other in node if other != "hydra"]
    is_free = parent.partition(".")[0] in ("env", "vars")
    if parent and not names and not is_free:  # Hydra has made a mapping of it, to set the key in
        return ConfigError(
            f"{asked or key}: no such key: {parent} is null in this recipe.{_to_add(parent, name, asked)}"
        )
    add = f" To add it: +{asked}" if asked else ""
    listed, any_name = _takes(node, parent, name)
    if add and listed:
        return ConfigError(f"{asked}: no such key.{add}")
    unknown = unknown_key(parent, name, names if parent else {*names, *groups()}, asked)
    return ConfigError(f"{unknown}{add}") if any_name or is_free else unknown


def _to_add(parent: str, name: str, asked: str) -> str:
    """The overrides that build what the recipe leaves out."""
    if parent not in _BUILT or not asked:
        return ""
    target = f"+{asked}" if name == "_target_" else f"+{parent}._target_=..."
    partial = f" +{parent}._partial_=true" if _BUILT[parent] else ""
    return f" To add one: {target}{partial}{'' if name == '_target_' else f' +{asked}'}"


def _takes(node: DictConfig, key: str, name: str) -> tuple[bool, bool]:
    if "_target_" not in node:
        return False, False
    try:
        return takes_argument(str(node["_target_"]), key, name)
    except ConfigError:  # told when the job is composed
        return False, False


def _missing(key: str) -> ConfigError:
    return ConfigError(f"{key} is missing: the recipe, or {key}=VALUE, has to say it")


def _unknown_choice(config: str, options: object) -> ConfigError:
    group, _, choice = config.rpartition("/")
    if not group:
        return ConfigError(f"there is no config {choice}")
    names = sorted(map(str, options)) if isinstance(options, (list, tuple)) else []
    allowed = f" Allowed: {', '.join(names)}." if names else ""
    return ConfigError(f"{group}={choice}: no such choice.{nearest(choice, names)}{allowed}")


def _override(error: Exception) -> str:
    """What was asked for: Hydra ends such a message with ``use +key=value``."""
    return str(error).rpartition("use +")[2] if "use +" in str(error) else ""


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _without_links(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("See https://"))
