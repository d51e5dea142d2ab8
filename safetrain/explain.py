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
from yaml import YAMLError

from safetrain.catalog import groups
from safetrain.checks import nearest, unknown_key
from safetrain.errors import ConfigError

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
"""What Hydra raises when a config cannot be composed or resolved."""


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
        parent, _, name = str(cause.full_key).rpartition(".")
        names = [str(key) for key in cause.parent_node if key != "hydra"]
        return unknown_key(parent, name, names if parent else {*names, *groups()}, _override(error))
    if isinstance(cause, MissingMandatoryValue):
        return _missing(str(cause.full_key))
    if isinstance(cause, InterpolationResolutionError):
        if missing := re.search(r"Missing mandatory value: (\S+)", str(cause)):  # OmegaConf keeps the key in words only
            return _missing(missing[1])
        return ConfigError(f"{cause.full_key}: {_first_line(cause)}")
    return ConfigError(_without_links(str(error) or str(cause)))


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
