"""What the person who watches sees: a bar, a line an epoch, each warning once, and at the end where everything is."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from safetrain import rank_log
from safetrain.observer import Event, RunInfo

_COLUMNS = 80  # of a terminal that does not know its width, as a CI's
_LABELS = {"skip": "skipped on every rank: ", "warning": "warning: "}


class ProgressBar:
    """A bar where standard error is a terminal; elsewhere (file, notebook) a line every ``line_every_s`` seconds."""

    def __init__(self, line_every_s: float = 60.0) -> None:
        self._line_every_s = line_every_s
        self._run: RunInfo | None = None
        self._bar: _Bar | None = None
        self._repeats = rank_log.Repeats()
        self._train: Mapping[str, float] = {}
        self._validations: list[Event] = []

    def start(self, run: RunInfo) -> None:
        if run.rank != 0:
            return
        self._run = run
        self._epoch = 0
        self._step = self._told_step = run.start_step
        self._started_at = self._told_at = time.monotonic()
        processes = "1 process" if run.world_size == 1 else f"{run.world_size} processes"
        rank_log.say(f"{run.name or 'training'}: {run.parameters:,} parameters, {processes} on {run.device}")
        if rank_log.terminal().isatty():
            self._bar = _Bar.on(rank_log.terminal(), run)

    def step(self, step: int, epoch: int) -> None:
        if self._run is None:
            return
        if epoch != self._epoch:
            self._tell()
            self._epoch = epoch
            self._label_bar()
        self._step = step
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._told_at > self._line_every_s:
            self._tell()

    def event(self, event: Event) -> None:
        if self._run is None:
            return
        if event.kind == "train":
            self._train = event.metrics
            self._label_bar()
        elif event.kind == "validation":
            self._validations.append(event)
            self._tell(event.metrics)
        elif event.kind == "end":
            self._tell()
            self._close_bar()
            self._summarise(event)
        elif event.text and event.kind not in ("failed", "preempted"):  # the verdict says it, at length
            text = self._repeats.pass_on(_LABELS.get(event.kind, "") + event.text)
            if text is not None:
                rank_log.say(f"step {event.step}: {text}")

    def close(self) -> None:
        self._close_bar()
        self._run = None

    def _label_bar(self) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self._place(), refresh=False)
            self._bar.set_postfix_str(", ".join(self._progress()), refresh=False)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            rank_log.set_progress_bar(None)

    def _tell(self, validation: Mapping[str, float] | None = None) -> None:
        """A line about the epoch so far, unless nothing happened since the last one."""
        assert self._run is not None
        if self._step == self._told_step and validation is None:
            return
        total = self._run.total_steps
        words = [self._place(), f"step {self._step}/{total or '?'}", *self._progress(), *_words(validation or {})]
        if total is not None and self._run.start_step < self._step < total:
            seconds_per_step = (time.monotonic() - self._started_at) / (self._step - self._run.start_step)
            words.append(f"{_Bar.format_interval(seconds_per_step * (total - self._step))} left")
        rank_log.say("  ".join(words))
        self._told_step, self._told_at = self._step, time.monotonic()

    def _place(self) -> str:
        assert self._run is not None
        return f"epoch {self._epoch + 1}/{self._run.epochs}"

    def _progress(self) -> list[str]:
        words = _words({name: value for name, value in self._train.items() if name.startswith("train/loss")})
        if "train/samples_per_s" in self._train:
            words.append(f"{self._train['train/samples_per_s']:,.0f} samples/s")
        if self._train.get("train/skipped_steps"):
            words.append(f"{self._train['train/skipped_steps']:.0f} skipped")
        return words

    def _summarise(self, end: Event) -> None:
        run = self._run
        assert run is not None
        rows = [("finished", f"after {end.step} steps" + (f": {end.text}" if end.text else ""))]
        for name in self._validations[-1].metrics if self._validations else ():
            history = [(event.metrics[name], event.epoch + 1) for event in self._validations if name in event.metrics]
            (low, low_at), (high, high_at) = (pick(history, key=itemgetter(0)) for pick in (min, max))
            extremes = f"  (lowest {low:.4g} in epoch {low_at}, highest {high:.4g} in epoch {high_at})"
            rows.append((name, f"{history[-1][0]:.4g}{'' if low == high else extremes}"))
        if run.run_dir is not None:
            here = run.run_dir.relative_to(Path.cwd()) if run.run_dir.is_relative_to(Path.cwd()) else run.run_dir
            places = {
                "run directory": ("", str(here)),
                "logs": ("logs", f"{here / 'logs'}/rank_*.log"),
                "events": ("events.jsonl", str(here / "events.jsonl")),
                "curves": ("tensorboard", f"tensorboard --logdir {here}"),
                "traces": ("traces", f"{here / 'traces'}, for https://ui.perfetto.dev"),
            }
            rows += [(title, text) for title, (name, text) in places.items() if (run.run_dir / name).exists()]
        width = max(len(title) for title, _ in rows)
        rank_log.say("\n".join(f"{title:<{width}}  {text}" for title, text in rows))


class _Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar without its extra thread and its lock between processes: one process draws it, from its loop."""

    monitor_interval = 0

    @classmethod
    def on(cls, terminal: TextIO, run: RunInfo) -> _Bar:
        cls.set_lock(threading.RLock())
        has_width = os.get_terminal_size(terminal.fileno()).columns > 0
        known = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}, {remaining} left"
        open_ended = "{desc} step {n_fmt}{postfix}, {elapsed} so far"
        bar = cls(
            total=run.total_steps,
            initial=run.start_step,
            desc=f"epoch 1/{run.epochs}",
            bar_format=known if run.total_steps else open_ended,
            smoothing=0,  # time left from the whole run so far: validation takes time as well
            miniters=1,
            dynamic_ncols=has_width,
            ncols=None if has_width else _COLUMNS,
            leave=False,
            file=terminal,
        )
        rank_log.set_progress_bar(functools.partial(cls.external_write_mode, file=terminal))
        return bar


def _words(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name.removeprefix('train/')} {value:.4g}" for name, value in metrics.items()]
