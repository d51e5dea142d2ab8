"""One training job on ranks of its own: run, started again if it failed and may, and its result."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safetrain.checks import nearest
from safetrain.config import Config
from safetrain.environ import Variable, announce
from safetrain.errors import ConfigError, Preempted, SafetrainError
from safetrain.failed import verdict_on
from safetrain.failure import read_failures
from safetrain.launch import Interrupted, launch, number_of_ranks
from safetrain.rank_log import fresh_line
from safetrain.run_dir import occupied, shown
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


def train(config: Config, variables: Sequence[Variable] = ()) -> float | None:
    """Run one job; returns the configured metric. ``variables``: what ``config.env`` came to, to tell and to keep.

    Raises:
        ConfigError: it asks for more than this machine has, or the metric was never logged.
        TrainingFailed: a rank failed, and no restart is left, or none would help.
        JobEnded: a signal ended it.
    """
    ranks, run_dir = number_of_ranks(config), Path(config.run_dir)
    with occupied(run_dir):
        prepare(config)
        print(f"{config.name}: {ranks} rank{'s' if ranks > 1 else ''}, {shown(run_dir)}", flush=True)
        announce(variables, run_dir)
        failed = _attempt(config, ranks)
        for number in range(1, config.launch.max_restarts + 1):
            if not failed:
                break
            print(f"{fresh_line(sys.stderr)}{failed}\n", file=sys.stderr)
            before, batch = _way_of_failing(run_dir), _batch_at_hand(run_dir)
            _set_aside(run_dir)
            saved = _newest(run_dir)
            print(f"Restart {number} of {config.launch.max_restarts}: {_from_where(config, saved)}.", flush=True)
            prepare(config := replace(config, resume="auto") if saved else config)
            failed = _attempt(config, ranks)
            if failed and _way_of_failing(run_dir) == before:
                again = "It failed in this way before, at the same place: no further restart."
                raise TrainingFailed(f"{failed}\n{again}{_poison(batch, _batch_at_hand(run_dir))}")
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
    forget(run_dir)
    (run_dir / "result.json").unlink(missing_ok=True)
    (run_dir / "config.yaml").write_text(config.to_yaml())


def _attempt(config: Config, ranks: int) -> str:
    """Run the ranks once: the story of their failure, empty where they did their work."""
    run_dir = Path(config.run_dir)
    env = {name: str(value) for name, value in config.env.items()}
    try:
        ended = launch(run_dir / "config.yaml", ranks, options=config.launch, env=env)
    except Interrupted as by:
        if by.number == signal.SIGTERM and (run_dir / "result.json").exists():  # it came as the job was done
            return ""
        raise JobEnded(*_interrupted(by, config, ranks)) from None
    if ended.ok and (run_dir / "result.json").exists():
        return ""
    told = published(run_dir)  # the ranks, or a watchdog, may have said all
    if told is None:
        verdict = verdict_on(run_dir, ranks, ended.exits)
        return verdict.publish(run_dir) or verdict.text(run_dir)
    if told.exit_code != _FAILED:
        raise JobEnded(*told)
    return told.text


def _interrupted(by: Interrupted, config: Config, ranks: int) -> Published:
    """The words, and the exit code, where the launcher got a signal."""
    run_dir = Path(config.run_dir)
    text = f"Interrupted by {by}; no rank is left. Run directory: {shown(run_dir)}"
    if by.number != signal.SIGTERM:
        return Published(text, 128 + by.number)
    if (told := published(run_dir)) is not None:  # preempted, or a watchdog was first
        return told
    if any(not failure.victim for failure in read_failures(run_dir)):  # to run it again would not help
        verdict = verdict_on(run_dir, ranks)
        return Published(verdict.publish(run_dir) or verdict.text(run_dir), verdict.exit_code)
    return Published(
        f"{text}\nThe ranks did not come to the end of a step in time. Run it again with resume=auto: "
        f"{_from_where(config, _newest(run_dir))}.",
        Preempted.EXIT_CODE,
    )


def _way_of_failing(run_dir: Path) -> tuple[str, ...]:
    """How the job failed, and where: the same again means that no restart gets past it. A rank that ended without a
    word names no step; there it counts that nothing was saved in between."""
    try:
        facts = json.loads((run_dir / "failure.json").read_text())
    except (OSError, ValueError):  # the disk took no file, or half of it
        return ()
    sentence = _VARIES.sub("", facts["sentence"])
    progress = "" if " at step " in sentence else _newest(run_dir)
    return sentence, facts["place"], facts["detail"], progress


def _batch_at_hand(run_dir: Path) -> str:
    """Which samples the ranks that failed were at, in words; empty where none were, or nobody could say."""
    try:
        return str(json.loads((run_dir / "failure.json").read_text())["batch"])
    except (OSError, ValueError):
        return ""


def _poison(before: str, now: str) -> str:
    """What to do about samples that were at hand both times."""
    if not now or before != now:
        return ""
    return (
        f"\nBoth times {now}. Look at these samples (failure.json has all of them), or leave them out: raise "
        "safetrain.SkipBatch in the dataset or in training_step."
    )


def _newest(run_dir: Path) -> str:
    """The name of the newest checkpoint; empty where there is none."""
    saved = Shelf(run_dir / "checkpoints").readable()
    return saved[0][0].name if saved else ""


def _from_where(config: Config, saved: str) -> str:
    if saved:
        return f"it goes on from {saved}"
    return "nothing was saved, it begins " + ("anew" if config.resume in ("none", "auto") else f"at {config.resume}")


def _set_aside(run_dir: Path) -> None:
    """Keep what is known of a failed attempt: ``failure.txt`` becomes ``failure_1.txt``, or the next free number."""
    names = ("failure.txt", "failure.json", "failure.html", "failures")
    kept = (
        [path.with_name(f"{path.stem}_{number}{path.suffix}") for path in map(run_dir.joinpath, names)]
        for number in itertools.count(1)
    )
    free = next(paths for paths in kept if not any(path.exists() for path in paths))
    for name, path in zip(names, free, strict=True):
        if (run_dir / name).exists():
            (run_dir / name).rename(path)
