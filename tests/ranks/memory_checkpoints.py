"""Checkpoints in memory, through the bytes of a file: what a test saves on one run and loads in another."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from safetrain.checkpoint import Saved
from safetrain.comm import Comm
from safetrain.snapshot import Snapshot


class MemoryCheckpoints:
    """All that were saved, by step; ``load`` takes the step, or ``auto`` for the newest."""

    def __init__(self, comm: Comm, steps: dict[int, bytes] | None = None) -> None:
        self._comm = comm
        self.steps: dict[int, bytes] = {} if steps is None else steps
        self.metrics: dict[int, float | None] = {}

    def save(self, snapshot: Snapshot, *, metric: float | None = None, wait: bool = False) -> None:
        owns = [_read(each) for each in self._comm.gather(_write(snapshot.own))]
        shared = self._comm.broadcast(_write(snapshot.shared))
        parts = (snapshot.step, snapshot.epoch, _read(shared), owns, snapshot.config_text)
        assert snapshot.step not in self.metrics, "one checkpoint a step"
        self.steps[snapshot.step] = _write(parts)
        self.metrics[snapshot.step] = metric

    def save_at_failure(self, step: int, take: Callable[[], Snapshot]) -> str:
        """All ranks have failed together, so they may still gather."""
        if step not in self.steps:
            self.save(take())
        return f"checkpoints/step_{step}"

    def finish(self) -> None:
        pass

    def load(self, where: str | Path) -> Saved | None:
        if not self.steps:
            return None
        step = max(self.steps) if str(where) == "auto" else int(str(where))
        step, epoch, shared, own, config_text = _read(self.steps[step])
        return Saved(Path(f"step_{step}"), step, epoch, len(own), shared, tuple(own), config_text)


def _write(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
