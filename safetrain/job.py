"""One training job on ranks of its own: run, started again if it failed and may, and its result."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

from safetrain.checks import nearest
from safetrain.config import Config
from safetrain.errors import ConfigError, Preempted, SafetrainError
from safetrain.failed import verdict_on
from safetrain.launch import Interrupted, launch, number_of_ranks
from safetrain.rank_log import fresh_line
from safetrain.run_dir import occupied
from safetrain.shelf import Shelf
from safetrain.verdict import Published, forget, published

_FAILED = 1
_VARIES = re.compile(r"process \d+|for \d+ s")


class TrainingFailed(SafetrainError):
    """Ranks failed; the message is the whole story."""


class JobEnded(Exception):
    """A signal ended the job, and with it the command; no rank is left."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def train(config: Config) -> float | None:
    """Run one job; returns the configured metric.

    Raises:
        ConfigError: it asks for more than this machine has, or the metric was never logged.
        TrainingFailed: a rank failed, and no restart is left, or none would help.
        JobEnded: a signal ended it.
    """
    ranks, run_dir = number_of_ranks(config), Path(config.run_dir)
    with occupied(run_dir):
        prepare(config)
        print(f"{config.name}: {ranks} rank{'s' if ranks > 1 else ''}, {shown(run_dir)}", flush=True)
        failed = _attempt(config, ranks)
        for number in range(1, config.launch.max_restarts + 1):
            if not failed:
                break
            before = _way_of_failing(run_dir)
            _set_aside(run_dir, number)
            print(f"{fresh_line(sys.stderr)}{failed}\n", file=sys.stderr)
            print(f"Restart {number} of {config.launch.max_restarts}: {_from_where(run_dir)}.", flush=True)
            prepare(config := replace(config, resume="auto"))
            failed = _attempt(config, ranks)
            if failed and _way_of_failing(run_dir) == before:
                raise TrainingFailed(f"{failed}\nIt failed in this way before, at the same place: no further restart.")
    if failed:
        raise TrainingFailed(failed)
    metrics = json.loads((run_dir / "result.json").read_text())["metrics"]
    if config.metric is None:
        return None
    if config.metric not in metrics:
        names = ", ".join(sorted(metrics)) or "none"
        raise ConfigError(f"metric={config.metric}: was not logged.{nearest(config.metric, metrics)} Logged: {names}.")
    return float(metrics[config.metric])


def prepare(config: Config) -> None:
    """Write ``config.yaml``; remove what an earlier job, told to use the same directory, would be mistaken for."""
    run_dir = Path(config.run_dir)
    shutil.rmtree(run_dir / "failures", ignore_errors=True)
    forget(run_dir)
    (run_dir / "result.json").unlink(missing_ok=True)
    (run_dir / "config.yaml").write_text(config.to_yaml())


def shown(path: Path) -> str:
    """``path`` as a person here would write it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _attempt(config: Config, ranks: int) -> str:
    """Run the ranks once: the story of their failure, empty where they did their work."""
    run_dir = Path(config.run_dir)
    env = {name: str(value) for name, value in config.env.items()}
    try:
        ended = launch(run_dir / "config.yaml", ranks, options=config.launch, env=env)
    except Interrupted as by:
        raise JobEnded(*_interrupted(by, run_dir)) from None
    if ended.ok and (run_dir / "result.json").exists():
        return ""
    told = published(run_dir)  # the ranks, or a watchdog, may have said all
    if told is None:
        verdict = verdict_on(run_dir, ranks, ended.exits)
        return verdict.publish(run_dir) or verdict.text(run_dir)
    if told.exit_code != _FAILED:
        raise JobEnded(*told)
    return told.text


def _interrupted(by: Interrupted, run_dir: Path) -> Published:
    """The words, and the exit code, where the launcher got a signal."""
    told = published(run_dir)
    if told is not None and told.exit_code == Preempted.EXIT_CODE:
        return told
    text = f"Interrupted by {by}; no rank is left. Run directory: {shown(run_dir)}"
    if by.number != signal.SIGTERM:
        return Published(text, 128 + by.number)
    return Published(
        f"{text}\nThe ranks did not come to the end of a step in time. Run it again with resume=auto: "
        f"{_from_where(run_dir)}.",
        Preempted.EXIT_CODE,
    )


def _way_of_failing(run_dir: Path) -> tuple[str, ...]:
    """How the job failed, and where: the same again means that no restart gets past it. A rank that ended without a
    word names no step; there it counts that nothing was saved in between."""
    try:
        facts = json.loads((run_dir / "failure.json").read_text())
    except FileNotFoundError:  # the disk took no file
        return ()
    return _VARIES.sub("", facts["sentence"]), facts["place"], facts["detail"], _from_where(run_dir)


def _from_where(run_dir: Path) -> str:
    saved = Shelf(run_dir / "checkpoints").readable()
    return f"it goes on from {saved[0][0].name}" if saved else "it begins anew, nothing was saved"


def _set_aside(run_dir: Path, attempt: int) -> None:
    """Keep what is known of a failed attempt: ``failure.txt`` becomes ``failure_1.txt``, and so on."""
    for name in ("failure.txt", "failure.json", "failures"):
        path = run_dir / name
        if path.exists():
            path.rename(path.with_name(f"{path.stem}_{attempt}{path.suffix}"))
