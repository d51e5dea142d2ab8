"""The schema of a run: every key, its type, its unit, and the checks that need no process.

``Config.parse`` turns the plain data that Hydra composed into checked dataclasses. Neither torch nor Hydra is imported
here: a typo is answered at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from omegaconf import OmegaConf

from safetrain.checks import (
    at_least,
    check_keys,
    check_node,
    check_nodes,
    check_types,
    more_than_zero,
    parse_section,
)
from safetrain.errors import ConfigError
from safetrain.launch_config import Launch as Launch
from safetrain.preflight_config import Preflight as Preflight
from safetrain.profile_config import Profile
from safetrain.variables import check_variable

Node = Mapping[str, Any]
"""A mapping with a ``_target_``: something that ``hydra.utils.instantiate`` builds."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long, and how, to train."""

    epochs: int = 1
    max_steps: int | None = None
    """Optimizer steps after which training ends, wherever it is in an epoch."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    clip_norm: float | None = None
    """Largest gradient norm (over all parameters of an optimizer)."""
    clip_value: float | None = None
    """Largest absolute value of a gradient's element."""
    log_every_steps: int = 10
    validate_every_epochs: int = 1
    nominal_weight: int | None = None
    """Weight (samples or tokens) of one full micro-batch; by default the loader's batch size."""

    def __post_init__(self) -> None:
        check_types(self, "loop")
        at_least(self, "loop", 1, "epochs", "max_steps", "accumulate", "nominal_weight")
        at_least(self, "loop", 1, "log_every_steps", "validate_every_epochs")
        more_than_zero(self, "loop", "clip_norm", "clip_value")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError("loop.clip_norm and loop.clip_value are both set: keep one, set the other to null")


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How batches are read; sizes are per rank."""

    batch_size: int = 32
    val_batch_size: int | None = None
    """By default ``batch_size``."""
    num_workers: int = 0
    """Loader processes per rank."""
    shuffle: bool = True
    drop_last: bool = True
    pin_memory: bool = False
    prefetch_factor: int | None = None
    """Batches that each loader process reads ahead; needs num_workers > 0."""
    persistent_workers: bool = True
    """Keep loader processes between epochs (used only with num_workers > 0)."""
    timeout_s: float = 0
    """Longest wait for a batch from a loader process; 0 waits for ever."""

    def __post_init__(self) -> None:
        check_types(self, "loader")
        at_least(self, "loader", 1, "batch_size", "val_batch_size", "prefetch_factor")
        at_least(self, "loader", 0, "num_workers", "timeout_s")
        if self.prefetch_factor is not None and self.num_workers == 0:
            raise ConfigError(
                f"loader.prefetch_factor={self.prefetch_factor} needs loader processes: set loader.num_workers >= 1, "
                "or loader.prefetch_factor=null"
            )


@dataclass(frozen=True, kw_only=True)
class Watchdog:
    """When a job that makes no progress is ended, with a verdict; see safetrain/watchdog.py."""

    enabled: bool = True
    stall_s: float = 60
    """Longest time without progress; ten times the longest that was seen in the same phase, where that is more."""
    first_step_stall_s: float = 600
    """The same for a phase that this process has not been through yet: the first step may compile."""
    poll_s: float = 0.25
    """Time between two looks."""

    def __post_init__(self) -> None:
        check_types(self, "watchdog")
        more_than_zero(self, "watchdog", "stall_s", "first_step_stall_s", "poll_s")


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What ranks compare so that they can't go on with different things; see safetrain/audit.py, collectives.py."""

    every_steps: int = 1000
    """Steps between two comparisons of parameters, buffers, optimizer state and learning rates; 0: never."""
    collectives: bool = True
    """Whether each vote compares the collectives that user code has issued."""

    def __post_init__(self) -> None:
        check_types(self, "audit")
        at_least(self, "audit", 0, "every_steps")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of a run is saved, which checkpoints are kept, and what to do when one can't be written; see
    safetrain/checkpoint.py."""

    every_steps: int | None = None
    every_minutes: float | None = 10
    every_epochs: int | None = 1
    at_end: bool = True
    keep_last: int | None = 3
    """Newest checkpoints that stay; None: all."""
    keep_best: int = 1
    """Best checkpoints that stay as well."""
    metric: str | None = None
    """What is best, such as ``val/accuracy``; by default the run's ``metric``."""
    mode: Literal["max", "min"] = "max"
    asynchronous: bool = True
    """Hold training for a copy in memory only, and write beside it."""
    on_error: Literal["warn", "stop"] = "warn"
    max_failures: int = 3
    """Saves in a row that may fail under ``warn``; the next one that does ends the job."""
    timeout_s: float = 1800
    """Longest time that a save, or a load, may take."""
    at_failure_s: float = 60
    """The same for the save of the last whole step when ranks fail; 0: none."""

    @property
    def saves(self) -> bool:
        """Whether a run is saved by itself."""
        return bool(self.every_steps or self.every_minutes or self.every_epochs or self.at_end)

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        at_least(self, "checkpoint", 1, "every_steps", "every_epochs", "keep_last")
        at_least(self, "checkpoint", 0, "keep_best", "max_failures", "at_failure_s")
        more_than_zero(self, "checkpoint", "every_minutes", "timeout_s")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do when a step does not go as planned; see safetrain/policies.py."""

    skip: Node
    uneven: Node
    non_finite: Node
    out_of_memory: Node
    unused: Node

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self)):
            check_node(getattr(self, name), f"policy.{name}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, resolved: what ``run_dir/config.yaml`` holds and every rank reads."""

    name: str
    run_dir: str
    trainer: Node
    model: Node | None = None
    """None: the Trainer builds it in Python (``build_model``); the same for data, optimizer and scheduler."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """``train`` and ``val`` are built; other keys are there for interpolation (``${data.root}``)."""
    optimizer: Mapping[str, Any] | None = None
    """One node, or a mapping from a submodule's name to its node."""
    scheduler: Mapping[str, Any] | None = None
    loop: Loop = field(default_factory=Loop)
    loader: Loader = field(default_factory=Loader)
    precision: Node
    strategy: Node
    policy: Policy
    observers: Mapping[str, Node | None] = field(default_factory=dict)
    launch: Launch = field(default_factory=Launch)
    watchdog: Watchdog = field(default_factory=Watchdog)
    audit: Audit = field(default_factory=Audit)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    preflight: Preflight = field(default_factory=Preflight)
    profile: Profile = field(default_factory=Profile)
    env: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables of the ranks; null: as the shell has it. See safetrain/environ.py."""
    resume: str = "none"
    """``auto``: from the newest checkpoint in ``run_dir``, if there is one; or the path of a checkpoint or a run."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    metric: str | None = None
    """The metric that a Hydra sweeper is told, such as ``val/accuracy``."""
    vars: Mapping[str, Any] = field(default_factory=dict)
    """Values of your own, for interpolation (``${vars.width}``)."""

    def __post_init__(self) -> None:
        check_types(self, "")
        at_least(self, "", 0, "seed")
        if self.watchdog.enabled and self.launch.timeout_s <= self.watchdog.stall_s:
            raise ConfigError(
                f"launch.timeout_s={self.launch.timeout_s} must be more than watchdog.stall_s={self.watchdog.stall_s}: "
                "a collective would fail on a healthy rank before the watchdog has found the one at fault"
            )
        for name in ("trainer", "model", "precision", "strategy"):
            check_node(getattr(self, name), name)
        for name in ("train", "val"):
            check_node(self.data.get(name), f"data.{name}")
        for name in ("optimizer", "scheduler"):
            check_nodes(getattr(self, name), name)
        for name, node in self.observers.items():
            check_node(node, f"observers.{name}")
        for name, value in self.env.items():
            check_variable(name, value)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Check plain data against the schema.

        Raises:
            ConfigError: a key is unknown or missing, or a value has the wrong type or is out of range.
        """
        check_keys(values)
        return parse_section(cls, values, "")

    def to_plain(self) -> dict[str, Any]:
        """Mappings, lists and scalars only; ``parse`` reads them back."""
        return asdict(self)

    def to_yaml(self) -> str:
        """The text of ``run_dir/config.yaml``; ``from_yaml`` reads it back."""
        return OmegaConf.to_yaml(OmegaConf.create(self.to_plain()))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """What ``to_yaml`` wrote. OmegaConf's YAML, since plain YAML reads 1e-4 as text."""
        return cls.parse(OmegaConf.to_container(OmegaConf.create(text), resolve=False))  # type: ignore[arg-type]
