"""What ranks say to a check, without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from safetrain.finding import Finding, Said


def said(*facts: Any, hosts: Sequence[str] = ()) -> list[Said]:
    """``facts`` of ranks 0, 1, ...; all on one machine unless ``hosts`` says otherwise."""
    places = list(hosts) or ["vm"] * len(facts)
    return [Said(rank, host, one) for rank, (host, one) in enumerate(zip(places, facts, strict=True))]


def only(findings: Sequence[Finding]) -> Finding:
    """The one finding."""
    (finding,) = findings
    return finding
