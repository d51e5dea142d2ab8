"""Before a guarded script's first step: are versions, environment, arguments and devices the same on all ranks?

Each rank leaves what it sees in the store once its process group is made, and goes on; rank 0 compares in a thread, and
warns. It refuses nothing: the script may have its reasons.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from safetrain import machine, versions
from safetrain.alike import ENVIRONMENT, VERSIONS, Alike, environment_that_matters
from safetrain.board import Store
from safetrain.finding import Finding, Said
from safetrain.words import names_in_words

_HEARS_FOR_S = 60.0
_LOOK_EVERY_S = 0.1
_ITS_RANK = re.compile(r"(?<!\S)--?((local|node|machine|global)[-_])?rank[= ]\d+(?!\S)")  # of a script that is told it

_SCRIPT: Alike[Any] = Alike(
    "script",
    read=lambda _: {},
    summary=lambda _: "",
    remedy="Start the same file with the same arguments on all ranks.",
)
_DEVICE: Alike[Any] = Alike(
    "device",
    read=lambda _: {},
    summary=lambda _: "",
    remedy="Let every rank see as many GPUs, and make the group with one backend.",
)
_CHECKS = {
    "versions": VERSIONS,
    "environment": replace(ENVIRONMENT, remedy="Set it for all ranks, where the launcher is started."),
    "script": _SCRIPT,
    "device": _DEVICE,
}


def facts(script: Path | None, backend: str) -> dict[str, Any]:
    """What this rank sees; plain data."""
    arguments = {"arguments": _ITS_RANK.sub("", " ".join(sys.argv[1:]))}
    digest = {"the script": hashlib.sha256(script.read_bytes()).hexdigest()[:12]} if script else {}
    cuda = torch.cuda.is_initialized()
    return {
        "host": machine.host(),
        "versions": versions.facts(),
        "environment": environment_that_matters(os.environ),
        "script": {**digest, **arguments},
        "device": {"backend": backend, "GPUs": str(torch.cuda.device_count())},
        "gpu": f"{machine.identity()} {torch.cuda.get_device_properties().uuid}" if cuda else "",
    }


def findings(seen: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What is not as it should be; ``seen``: by rank. Pure."""
    found = []
    for name, check in _CHECKS.items():
        said = [Said(rank, one["host"], one[name]) for rank, one in enumerate(seen)]
        found += [finding for finding in check.judge(said) if finding.verdict != "ok"]
    users: dict[str, list[int]] = {}
    for rank, one in enumerate(seen):
        if one["gpu"]:
            users.setdefault(one["gpu"], []).append(rank)
    for ranks in users.values():
        if len(ranks) > 1:
            words = f"{names_in_words([f'rank {rank}' for rank in ranks])} compute on one GPU."
            remedy = "Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the group is made."
            found.append(Finding("gpu", "shared", "warn", tuple(ranks), words, remedy))
    return found


def compare(store: Store, world_size: int, say: Callable[[str], None]) -> None:
    """On rank 0: read what all ranks leave under ``facts/<rank>``, and say what is found; in a thread."""

    def hear() -> None:
        keys = [f"facts/{rank}" for rank in range(world_size)]
        deadline = time.monotonic() + _HEARS_FOR_S
        while not store.check(keys):
            if time.monotonic() > deadline:  # some rank makes no group: what it waits for, the watchdog tells
                return
            time.sleep(_LOOK_EVERY_S)
        found = findings([json.loads(store.get(key)) for key in keys])
        if found:
            say("\n  ".join(["the ranks are not alike:", *map(str, found)]))

    threading.Thread(target=hear, name="safetrain-preflight", daemon=True).start()
