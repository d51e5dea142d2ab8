"""Everything a run needs to go on from one of its steps, as the loop hands it over to be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two optimizer steps.

    Attributes:
        step: optimizer steps done.
        shared: the same on every rank (model, optimizers, ...): nested dicts of tensors and plain values.
        own: this rank's only (random number generators, position in the data, ...).
        config_text: the resolved config, as YAML.
    """

    step: int
    epoch: int
    shared: dict[str, Any]
    own: dict[str, Any]
    config_text: str
