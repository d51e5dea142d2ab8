"""One training job on ranks of its own: run, started again if it failed and may, and its result."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from safetrain.alone import Alone
from safetrain.checks import nearest
from safetrain.comm import serve_store
from safetrain.config import Config
from safetrain.crew import Leader
from safetrain.environ import Variable, announce
from safetrain.errors import ConfigError, Preempted, SafetrainError
from safetrain.failed import verdict_on
from safetrain.failure import read_failures
from safetrain.injection import marked_as_trial
from safetrain.launch import Ended, launch, number_of_ranks
from safetrain.machines import environment_of, lost_in_words, verdict_on_machines
from safetrain.orders import FAILED, JobEnded, Outcome, Published, TrainingFailed, exit_code_of
from safetrain.rank_log import fresh_line
from safetrain.run_dir import occupied, passed_over, shown
from safetrain.signals import Interrupted
from safetrain.verdict import last_checkpoint, newest_checkpoint, published, put_away

_VARIES = re.compile(r"process \d+|for \d+ s")


def train(config: Config, variables: Sequence[Variable] = (), crew: Alone | Leader | None = None) -> float | None:
    """Run one job, with the launchers of other machines where there is a ``crew``; returns the configured metric.
    ``variables``: what ``config.env`` came to, to tell and to keep.

    Raises:
        ConfigError: it asks for more than this machine has, or the metric was never logged.
        TrainingFailed: a rank failed, and no restart is left, or none would help.
        JobEnded: a signal ended it.
    """
    crew = crew or Alone(number_of_ranks(config))
    try:
        metric = _train(config, variables, crew)
    except JobEnded as ended:
        crew.tell(Outcome(str(ended), ended.exit_code))
        raise
    except SafetrainError as error:
        crew.tell(Outcome(str(error), exit_code_of(error)))
        raise
    crew.tell(Outcome(metric=metric))
    return metric


def _train(config: Config, variables: Sequence[Variable], crew: Alone | Leader) -> float | None:
    run_dir = Path(config.run_dir)
    with occupied(run_dir):
        prepare(config)
        ranks, machines = crew.shares[0].world_size, len(crew.shares)
        where = f" on {machines} machines" if machines > 1 else ""
        print(f"{config.name}: {ranks} rank{'s' if ranks > 1 else ''}{where}, {shown(run_dir)}", flush=True)
        if passed := passed_over(run_dir):
            print(passed, flush=True)
        announce(variables, run_dir)
        failed = _attempt(config, crew)
        for number in range(1, config.launch.max_restarts + 1):
            if not failed or crew.lost:
                break
            before, batch = _way_of_failing(run_dir), _batch_at_hand(run_dir)
            put_away(run_dir)
            saved = newest_checkpoint(run_dir)
            restart = f"Restart {number} of {config.launch.max_restarts}: {_from_where(config, saved)}."
            print(f"{fresh_line(sys.stderr)}{failed}\n", file=sys.stderr)
            print(restart, flush=True)
            crew.tell(Outcome(f"{failed}\n{restart}", again=True))
            prepare(config := replace(config, resume="auto") if saved else config)
            failed = _attempt(config, crew)
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
    put_away(run_dir)
    (run_dir / "result.json").unlink(missing_ok=True)
    (run_dir / "config.yaml").write_text(config.to_yaml())


def _attempt(config: Config, crew: Alone | Leader) -> str:
    """Run the ranks once: the story of their failure, empty where they did their work."""
    run_dir = Path(config.run_dir)
    env = environment_of(config, crew)
    by: Interrupted | None = None
    store, port = serve_store(timedelta(seconds=config.launch.timeout_s), crew.shares[0].host)
    share = crew.start(config.to_yaml(), port)
    try:
        ended = launch(run_dir / "config.yaml", share, crew, options=config.launch, env=env)
    except Interrupted as interrupted:
        by, ended = interrupted, Ended(False, [])
    reports = crew.gather(ok=ended.ok)
    del store  # the ranks of other machines may have needed it until now
    if by is not None or crew.signalled is not None:
        by = Interrupted(*crew.signalled) if crew.signalled else by
        assert by is not None
        if by.number == signal.SIGTERM and (run_dir / "result.json").exists():  # it came as the job was done
            return ""
        text, code = _interrupted(by, config, share.world_size)
        raise JobEnded(f"{marked_as_trial(text)}{_where(by)}", code)
    if ended.ok and not crew.lost and all(report.ok for report in reports) and (run_dir / "result.json").exists():
        return ""
    # the ranks, or a watchdog, may have said all
    told = published(run_dir) or next((report.told for report in reports if report.told), None)
    if told is None:
        verdict = verdict_on_machines(run_dir, crew, ended.exits, reports)
        return verdict.publish(run_dir) or verdict.text(run_dir)
    if told.exit_code != FAILED:
        raise JobEnded(*told)
    return told.text + lost_in_words(crew)


def _where(by: Interrupted) -> str:
    return f"\n{by.number.name} came to the launcher on {by.host}.\n" if by.host else ""


def _interrupted(by: Interrupted, config: Config, ranks: int) -> Published:
    """The words, and the exit code, where the launcher got a signal."""
    run_dir = Path(config.run_dir)
    text = f"Interrupted by {by}; no rank is left. Run directory: {shown(run_dir)}"
    if by.number != signal.SIGTERM:
        saved = last_checkpoint(run_dir)
        return Published(f"{text}\n{saved}" if saved else text, 128 + by.number)
    if (told := published(run_dir)) is not None:  # preempted, or a watchdog was first
        return told
    if any(not failure.victim for failure in read_failures(run_dir)):  # to run it again would not help
        verdict = verdict_on(run_dir, ranks)
        return Published(verdict.publish(run_dir) or verdict.text(run_dir), verdict.exit_code)
    return Published(
        f"{text}\nThe ranks did not come to the end of a step in time. Run it again with resume=auto: "
        f"{_from_where(config, newest_checkpoint(run_dir))}.",
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
    progress = "" if " at step " in sentence else newest_checkpoint(run_dir)
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


def _from_where(config: Config, saved: str) -> str:
    if saved:
        return f"it goes on from {saved}"
    return "nothing was saved, it begins " + ("anew" if config.resume in ("none", "auto") else f"at {config.resume}")
