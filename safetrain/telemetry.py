"""What a run writes into its directory: events as JSON lines, and TensorBoard curves. (The bar is in progress.py.)"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from safetrain.observer import OF_THE_MACHINE, Event, Observer, RunInfo
from safetrain.progress import ProgressBar

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Event", "EventLog", "Observer", "ProgressBar", "RunInfo", "TensorBoard"]


class EventLog:
    """``run_dir/events.jsonl``: one JSON object a line, flushed as it happens. NaN and infinities are strings."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, run: RunInfo) -> None:
        if run.rank != 0 or run.run_dir is None:
            return
        run.run_dir.mkdir(parents=True, exist_ok=True)
        path = run.run_dir / "events.jsonl"
        _cut_off_events(path, run.start_events)
        self._file = path.open("a", buffering=1, encoding="utf-8")
        facts = asdict(run) | {"run_dir": str(run.run_dir)}
        del facts["config_text"], facts["rank"]  # config.yaml lies beside it; a run has many ranks
        del facts["start_events"]  # it counts lines of this file
        self._write({"kind": "start", **facts})

    def step(self, step: int, epoch: int) -> None:
        pass

    def event(self, event: Event) -> None:
        metrics = {name: value if math.isfinite(value) else str(value) for name, value in event.metrics.items()}
        facts = {"kind": event.kind, "step": event.step, "epoch": event.epoch, "metrics": metrics, "text": event.text}
        self._write(facts)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, facts: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"time": time.time(), **facts}) + "\n")


class TensorBoard:
    """``run_dir/tensorboard``: a curve for each metric, and the resolved config as text."""

    def __init__(self, flush_s: int = 10) -> None:
        self._flush_s = flush_s
        self._run: RunInfo | None = None
        self._writer: SummaryWriter | None = None

    def start(self, run: RunInfo) -> None:
        if run.rank == 0 and run.run_dir is not None:
            self._run = run

    def step(self, step: int, epoch: int) -> None:
        pass

    def event(self, event: Event) -> None:
        if self._writer is not None and event.kind == "checkpoint":
            self._writer.flush()  # the run that goes on from it draws only what comes after
        if self._run is None or not event.metrics or event.kind == "end":  # the end only repeats
            return
        if self._writer is None:
            self._writer = self._open(self._run)
        for name, value in event.metrics.items():
            self._writer.add_scalar(name, value, event.step)
        if event.kind == "validation":
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, run: RunInfo) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter  # 1 s to import: not before the first step

        assert run.run_dir is not None
        folder = run.run_dir / "tensorboard"
        # what an earlier process drew beyond the step from which this one goes on is cut off
        purge_step = run.start_step + 1 if folder.exists() else None
        writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=self._flush_s)
        writer.add_text("config", f"```yaml\n{run.config_text}\n```", run.start_step)
        return writer


def _cut_off_events(path: Path, keep: int) -> None:
    """Leave the first ``keep`` events, and every start: what came after them, the run is about to tell again."""
    if not path.exists():
        return
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        is_start, counts = '"kind": "start"' in line, not any(f'"kind": "{kind}"' in line for kind in OF_THE_MACHINE)
        if line.endswith("\n") and (is_start or keep > 0):  # a process that was killed may have left half a line
            kept.append(line)
            keep -= counts and not is_start
    draft = path.with_suffix(".draft")
    draft.write_text("".join(kept), encoding="utf-8")
    draft.replace(path)
