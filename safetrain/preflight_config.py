"""The preflight's part of the config, with the names of its checks: a typo is answered before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from safetrain.checks import check_types, more_than_zero, unknown_key
from safetrain.errors import ConfigError

ONLY_CHECKS = "SAFETRAIN_ONLY_CHECKS"
"""The environment variable that tells a rank to look and not to train: ``machine``, or ``job`` for all checks."""
CHECK_NAMES = (
    "versions", "environment", "config", "ranks", "settings", "cores", "open_files", "gpus", "name_lookup",
    "all_reduce", "links", "clock",
    "parameters", "code", "dataset", "batches", "run_dir", "disk", "memory", "shared_memory", "fork",
    "first_batch", "random", "first_step",
)  # fmt: skip
"""In the order in which they run."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What is checked before the first step, and what a check may do; see safetrain/checkup.py."""

    enabled: bool = True
    deep: bool = False
    """Also run one forward and backward on each rank alone, before the first step."""
    checks: Mapping[str, Any] = field(default_factory=dict)
    """Name of a check -> ``refuse``, ``warn`` or ``off``; None, or not named: as the check thinks fit."""
    all_reduce_s: float = 20
    """Longest wait for the first sum over all ranks; a try of another transport may take as long again."""
    links_s: float = 0.5
    """Time for measuring how fast ranks reach each other."""
    clock_s: float = 2
    """Difference of two machines' clocks that is told."""
    name_lookup_s: float = 1
    """Longest wait for the name of this machine's address."""
    dataset_s: float = 0.5
    """Time for reading a few items of the training data."""

    def __post_init__(self) -> None:
        check_types(self, "preflight")
        more_than_zero(self, "preflight", "all_reduce_s", "links_s", "clock_s", "name_lookup_s", "dataset_s")
        for name, choice in self.checks.items():
            if name not in CHECK_NAMES:
                raise unknown_key("preflight.checks", name, CHECK_NAMES)
            if choice not in (None, "refuse", "warn", "off", False):  # YAML reads off as false
                raise ConfigError(f"preflight.checks.{name}={choice}: must be one of refuse, warn, off")

    def choice(self, check: str) -> str | None:
        """What ``checks`` says about one."""
        choice = self.checks.get(check)
        return "off" if choice is False else choice
