"""The options of ``python -m safetrain.tune``: a typo is answered before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

from safetrain.checks import at_least, check_types, unknown_key
from safetrain.errors import ConfigError

TUNE = "SAFETRAIN_TUNE"
"""The environment variable that tells a rank to try ways to train, and how long; JSON of ``Tune``."""
_PREFIX = "tune."


@dataclass(frozen=True, kw_only=True)
class Tune:
    """How long to try; the options ``tune.*`` of the command."""

    steps: int = 30
    """Steps that are measured, a turn."""
    warmup_steps: int = 5
    """Steps before them: buckets are laid out anew after the first, and memory is found."""
    rounds: int = 6
    """Turns of each way; with fewer than 6, chance can't be told from a difference."""

    def __post_init__(self) -> None:
        check_types(self, "tune")
        at_least(self, "tune", 1, "steps", "warmup_steps")
        at_least(self, "tune", 6, "rounds")

    @classmethod
    def said(cls, arguments: Sequence[str]) -> tuple[Self, list[str]]:
        """The options in a command line, and the arguments that are left: those of the job.

        Raises:
            ConfigError: there is no such option, or it can't have that value.
        """
        names = [one.name for one in fields(cls)]
        values: dict[str, int] = {}
        for argument in arguments:
            if argument.startswith(_PREFIX):
                key, _, value = argument.partition("=")
                name = key.removeprefix(_PREFIX)
                if name not in names:
                    raise unknown_key("tune", name, names)
                if not value.isdecimal():
                    raise ConfigError(f"{key}={value}: must be an integer")
                values[name] = int(value)
        return cls(**values), [argument for argument in arguments if not argument.startswith(_PREFIX)]

    @property
    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(**json.loads(text))
