"""What differs between the config of a checkpoint and that of the run that goes on from it, and which one holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

_OF_NO_EFFECT = (
    "name", "run_dir", "resume", "observers", "launch", "watchdog", "audit", "checkpoint", "env", "metric", "device",
)  # fmt: skip
_FROM_CHECKPOINT = {
    "optimizer": "the optimizer goes on with the checkpoint's values; change its param_groups in Python",
    "scheduler": "the schedule goes on as the checkpoint's",
    "precision": "this run's holds from here on, but a loss scale goes on as the checkpoint's",
}


def differences(before: str, now: str) -> list[str]:
    """A line for each key of two YAML configs that differs and changes what is trained."""
    if not before.strip() or not now.strip():  # a Trainer that was built in Python
        return []
    then, here = flat(before), flat(now)
    return [
        f"{key}: {then.get(key, 'not there')} then, {here.get(key, 'not there')} now; {_what_holds(key)}"
        for key in dict.fromkeys([*then, *here])
        if then.get(key, key) != here.get(key, key) and key.split(".")[0] not in _OF_NO_EFFECT
    ]


def _what_holds(key: str) -> str:
    return _FROM_CHECKPOINT.get(key.split(".")[0], "this run's holds from here on")


def flat(text: str) -> dict[str, Any]:
    """YAML as values by their keys: ``{"loop.epochs": 5, ...}``."""
    return dict(_leaves(OmegaConf.to_container(OmegaConf.create(text), resolve=False), ""))


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, node
