"""The profile's part of the config: what is recorded of which steps, and the observer that it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from safetrain.checks import at_least, check_types
from safetrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which steps are recorded, and by what; see safetrain/profiling.py."""

    tool: Literal["none", "torch", "nsight"] = "none"
    """torch: one trace of all ranks in the run directory; nsight: ranges for Nsight Systems, on GPUs."""
    start: int = 20
    """Number of the first step that is recorded, from 0."""
    count: int = 5
    """Steps that are recorded."""
    stacks: bool = True
    """With the line of Python that called each operator. It slows Python down while it records."""
    shapes: bool = True
    """With the shapes of each operator's tensors."""

    def __post_init__(self) -> None:
        check_types(self, "profile")
        at_least(self, "profile", 0, "start")
        at_least(self, "profile", 1, "count")

    def observers(self) -> list[dict[str, Any]]:
        """The nodes of the observers that record."""
        window = {"start": self.start, "count": self.count}
        if self.tool == "torch":
            detail = {"stacks": self.stacks, "shapes": self.shapes}
            return [{"_target_": "safetrain.profiling.StepProfile", **window, **detail}]
        return [{"_target_": "safetrain.nsight.NsightRanges", **window}] if self.tool == "nsight" else []

    def check_device(self, *, gpus: bool) -> None:
        """Raises:
        ConfigError: the tool is for GPUs, and ranks compute on CPUs.
        """
        if self.tool == "nsight" and not gpus:
            raise ConfigError("profile=nsight needs a GPU, and ranks compute on CPUs here: profile=steps records those")
