"""Environment variables that are known to do harm, or that nobody reads under the name they have."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.finding import Finding, Here, Said, Verdict, groups, ranks_of, who
from safetrain.variables import RENAMED

_OFF = ("", "0", "OFF", "NO", "N", "FALSE")


@dataclass(frozen=True)
class Settings:
    """Known-bad settings of the environment."""

    name: str = "settings"

    def look(self, here: Here) -> dict[str, Any]:
        interesting = [*RENAMED, *RENAMED.values(), *_KNOWN_BAD, "NCCL_SOCKET_IFNAME"]
        return {
            "set": {name: os.environ[name] for name in interesting if name in os.environ},
            "device": here.comm.device.type,
            "interfaces": [name for _, name in socket.if_nameindex()],
        }

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        found = groups(said, lambda facts: tuple(_bad(facts["set"], facts["device"], facts["interfaces"])))
        findings = [
            Finding(self.name, setting, verdict, ranks_of(some), f"{setting} on {who(some, said)}: {words}", remedy)
            for bad, some in found.items()
            for setting, verdict, words, remedy in bad
        ]
        return findings or [Finding(self.name, "nothing known to do harm")]


def _bad(environ: Mapping[str, str], device: str, interfaces: Sequence[str]) -> list[tuple[str, Verdict, str, str]]:
    """(setting, verdict, what is wrong, remedy) of each that is bad."""
    found: list[tuple[str, Verdict, str, str]] = []
    for old, new in RENAMED.items():
        if old in environ:
            also = f", and {new}={environ[new]} is set, too" if new in environ else ""
            remedy = f"Unset {old}." if new in environ else f"Set {new}={environ[old]} in its place, if you need it."
            found.append((f"{old}={environ[old]}", "warn", f"its name today is {new}{also}.", remedy))
    for name, (values, verdicts, words, remedy) in _KNOWN_BAD.items():
        value = environ.get(name, "")
        if value.upper() in values if values else value.upper() not in _OFF:
            found.append((f"{name}={value}", verdicts.get(device, "warn"), words, remedy))
    if (wanted := environ.get("NCCL_SOCKET_IFNAME", "")) and device == "cuda" and not _matches(wanted, interfaces):
        words = f"no such interface; there are {', '.join(interfaces)}."
        found.append((f"NCCL_SOCKET_IFNAME={wanted}", "refuse", words, "Name one of them (`ip addr` tells which)."))
    return found


def _matches(wanted: str, interfaces: Sequence[str]) -> bool:
    """NCCL's own syntax: prefixes, ``=`` for whole names, ``^`` to exclude."""
    exclude, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    whole, wanted = wanted.startswith("="), wanted.removeprefix("=")
    names = [name.partition(":")[0] for name in wanted.split(",") if name]
    hit = [any(there == name if whole else there.startswith(name) for name in names) for there in interfaces]
    return not all(hit) if exclude else any(hit)


_KNOWN_BAD: dict[str, tuple[tuple[str, ...], dict[str, Verdict], str, str]] = {
    "TORCH_DISTRIBUTED_DEBUG": (
        ("DETAIL",),
        {"cpu": "refuse"},
        "DistributedDataParallel crashes under it with Gloo (SIGSEGV), and is slow with NCCL.",
        "Set it to INFO, or unset it: safetrain compares the ranks' collectives by itself.",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (
        (),
        {},
        "it switches torch's own watchdog off, and holds the host up at every collective.",
        "Unset it: safetrain ends a job that stands still.",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        (),
        {},
        "every kernel is waited for, so nothing overlaps.",
        "Unset it, unless you look for the kernel that fails.",
    ),
}
"""Variable -> values that do harm (none: all that switch it on), verdicts by device, what is wrong, remedy."""
