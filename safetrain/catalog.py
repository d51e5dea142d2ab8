"""What there is to choose: the recipes, shipped and of the current folder, and the config groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from safetrain.errors import ConfigError

USER_RECIPES = Path("recipe")
"""Where a user's recipes lie, seen from the folder in which the command is given."""


@dataclass(frozen=True)
class Recipe:
    """A recipe and the first line of its comment."""

    name: str
    about: str
    shipped: bool


def recipes() -> list[Recipe]:
    """All recipes by name, shipped ones first.

    Raises:
        ConfigError: a recipe of the current folder has the name of a shipped one, which would win.
    """
    shipped = _read(files("safetrain.configs") / "recipe", shipped=True)
    own = _read(USER_RECIPES, shipped=False)
    for name in sorted({recipe.name for recipe in shipped} & {recipe.name for recipe in own}):
        raise ConfigError(f"{USER_RECIPES / name}.yaml: safetrain ships a recipe of that name; give yours another one")
    return shipped + own


def groups() -> list[str]:
    """The config groups that safetrain ships, such as ``policy/skip``."""
    return sorted(_groups(files("safetrain.configs"), ""))


def _read(folder: Traversable, *, shipped: bool) -> list[Recipe]:
    if not folder.is_dir():
        return []
    found = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return sorted((Recipe(f.name.removesuffix(".yaml"), _about(f), shipped) for f in found), key=lambda r: r.name)


def _about(file: Traversable) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.strip("# :")
    return ""


def _groups(folder: Traversable, prefix: str) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith("_"):
            if any(file.name.endswith(".yaml") for file in entry.iterdir()):
                yield prefix + entry.name
            yield from _groups(entry, f"{prefix}{entry.name}/")
