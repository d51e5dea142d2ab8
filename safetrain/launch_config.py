"""The keys of ``launch``: how many ranks on how many machines, where they meet, and how long anything may wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from safetrain.checks import at_least, check_types, more_than_zero, unknown_key
from safetrain.errors import ConfigError

ONE_MACHINE = {"nnodes": 1, "node_rank": 0, "rdzv_endpoint": None}
"""The keys of a job whose ranks somebody else has started."""

_LEAST_SILENCE_S = 2  # four beats of a launcher (see link.py)
_HIGHEST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the ranks are started on each machine, and how long anything may wait."""

    nproc_per_node: Literal["auto"] | int = "auto"
    """Ranks on this machine; ``auto`` is one for each GPU, or two on a machine without."""
    nnodes: Literal["auto"] | int = 1
    """Machines, on each of which the same command is started; ``auto``: as the scheduler says."""
    node_rank: Literal["auto"] | int = 0
    """Which of them this one is, from 0."""
    rdzv_endpoint: str | None = None
    """``host:port`` of node 0, where the machines meet; or ``auto``."""
    node_timeout_s: float = 15
    """Longest silence of a machine before the others end the job."""
    timeout_s: float = 1800
    """Longest wait in a collective."""
    join_timeout_s: float = 20
    """Longest wait at the start for machines, and for ranks, that do not come."""
    grace_s: float = 3
    """Time that a rank has to end when another one has failed, before SIGKILL."""
    max_restarts: int = 0
    """Times that ranks that failed are started again, to go on from the last checkpoint."""
    preemption_grace_s: float = 30
    """Time that all ranks have to save and to end when the launcher gets SIGTERM, before SIGKILL."""

    def __post_init__(self) -> None:
        check_types(self, "launch")
        if self.nproc_per_node != "auto":
            at_least(self, "launch", 1, "nproc_per_node")
        more_than_zero(self, "launch", "timeout_s", "join_timeout_s")
        at_least(self, "launch", _LEAST_SILENCE_S, "node_timeout_s")
        at_least(self, "launch", 0, "grace_s", "preemption_grace_s", "max_restarts")
        if self.rdzv_endpoint not in (None, "auto"):
            _ = self.endpoint
        if self.nnodes == "auto" or self.node_rank == "auto":
            return
        at_least(self, "launch", 1, "nnodes")
        at_least(self, "launch", 0, "node_rank")
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"launch.node_rank={self.node_rank}: must be below launch.nnodes={self.nnodes}; the first is 0"
            )
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise ConfigError(
                f"launch.nnodes={self.nnodes} needs launch.rdzv_endpoint=host:port: the machine of node 0 and a port "
                "that is free there, the same on all machines"
            )

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Check plain data.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type or is out of range.
        """
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_key("launch", name, known)
        return cls(**values)

    @property
    def nodes(self) -> int:
        """How many machines; known when nothing is ``auto`` any more."""
        assert self.nnodes != "auto"
        return self.nnodes

    @property
    def number(self) -> int:
        """Which of them this one is."""
        assert self.node_rank != "auto"
        return self.node_rank

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of node 0.

        Raises:
            ConfigError: it is not ``host:port``.
        """
        host, _, port = str(self.rdzv_endpoint).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= _HIGHEST_PORT:
            raise ConfigError(
                f"launch.rdzv_endpoint={self.rdzv_endpoint}: must be host:port, such as node0:29500 (port 1-65535)"
            )
        return host.removeprefix("[").removesuffix("]"), int(port)
