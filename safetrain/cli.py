"""The command line: a job's config is composed and checked once, here, and then ranks are started on it.

    python -m safetrain                           lists the recipes
    python -m safetrain recipe=NAME ...           composes, checks, launches; in a sweep (-m) one job after the other
    python -m safetrain recipe=NAME resume=auto   goes on with the run of that name that was the last to save
    torchrun ... -m safetrain recipe=NAME         rank 0 composes and checks, all ranks train

Exit codes: 0 all went well, 1 training failed, 2 config or use is wrong, 75 preempted (saved as far as possible: run it
again), 128 + n signal n ended it (Ctrl-C: 130).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.catalog import recipes
from safetrain.errors import ConfigError, SafetrainError, UsageError
from safetrain.rank_log import fresh_line
from safetrain.run_dir import forget_restart, note_for_restart, occupied, run_before_restart

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from safetrain.config import Config

OK, FAILED, WRONG = 0, 1, 2


@dataclass
class Job:
    """One training job of this command, for the table at the end of a sweep."""

    overrides: str
    run_dir: str = ""
    metric: float | None = None
    exit_code: int = OK


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    try:
        if "RANK" not in os.environ and not arguments:
            print(list_recipes())
            return OK
        from safetrain.launch import has_launcher  # from here on, imports take seconds

        return _as_rank(arguments) if has_launcher() else _as_launcher()
    except (ConfigError, UsageError) as error:
        _complain(error)
        return WRONG


def list_recipes() -> str:
    """The text that ``python -m safetrain`` prints."""
    found = recipes()
    width = max((len(recipe.name) for recipe in found), default=0)
    lines = [f"  {r.name:<{width}}  {r.about}{'' if r.shipped else f'  (./recipe/{r.name}.yaml)'}" for r in found]
    name = found[0].name if found else "NAME"
    hints = {f"recipe={name}": "train", f"recipe={name} --cfg job": "print what will run", "--help": "all choices"}
    commands = [f"  python -m safetrain {arguments:<{len(name) + 18}} {what}" for arguments, what in hints.items()]
    return "\n".join(["Recipes:", *(lines or ["  none; write ./recipe/NAME.yaml"]), "", *commands])


def _as_launcher() -> int:
    """Compose, and start ranks for each job."""
    from safetrain.compose import for_each_job, job_overrides, resolve
    from safetrain.job import JobEnded, shown, train

    jobs: list[Job] = []

    def run(composed: DictConfig) -> float | None:
        jobs.append(job := Job(job_overrides()))
        try:
            config = resolve(composed)
            job.run_dir = shown(Path(config.run_dir))
            job.metric = train(config)
        except JobEnded as ended:
            _complain(str(ended))
            raise SystemExit(ended.exit_code) from None  # no Exception: it ends a sweep, too
        except SafetrainError as error:
            job.exit_code = WRONG if isinstance(error, (ConfigError, UsageError)) else FAILED
            _complain(error)
            raise
        return job.metric

    try:
        for_each_job(run)
    except SafetrainError:
        if not jobs:  # else it was told when it happened
            raise
    if len(jobs) > 1:
        print("\n".join(_table(jobs)))
    return next((job.exit_code for job in jobs if job.exit_code != OK), OK)


def _as_rank(arguments: Sequence[str]) -> int:
    """A rank that another launcher started: rank 0 composes for all."""
    from safetrain.config import Config
    from safetrain.handover import Handover
    from safetrain.lifetime import die_with_parent

    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun: killed, it would leave its ranks running
        die_with_parent()
    handover = Handover(arguments)
    with ExitStack() as held:
        if handover.rank == 0:
            try:
                text = _compose_for_ranks(arguments, held)
            except SystemExit as leave:  # --help, or an argument that Hydra refused
                handover.end(leave.code if isinstance(leave.code, int) else OK)
                raise
            except (ConfigError, UsageError):
                handover.end(WRONG)
                raise
            if not text:
                handover.end(OK)
                return OK
            handover.give(text)
        config = Config.from_yaml(text if handover.rank == 0 else handover.take())
        os.environ.update({name: str(value) for name, value in config.env.items()})
        from safetrain.worker import run

        run(config, tells=True)
        if handover.rank == 0:
            forget_restart()
    return OK


def _compose_for_ranks(arguments: Sequence[str], held: ExitStack) -> str:
    """The config of the one job, as YAML; empty where there is none, such as for ``--cfg job``. ``held`` keeps other
    jobs out of its directory.

    Where torchrun has started the ranks again, it is that of the run that they were in, if it has saved anything.
    """
    if not arguments:
        print(list_recipes())
        return ""
    if {"-m", "--multirun"} & set(arguments):
        raise UsageError(
            "a sweep needs a launcher of its own for each job: run `python -m safetrain -m ...` without torchrun"
        )
    from safetrain.compose import for_each_job, resolve
    from safetrain.job import prepare, shown

    if run_dir := run_before_restart():
        sys.argv = [argument for argument in sys.argv if not argument.startswith("resume=")] + [f"resume={run_dir}"]
    configs: list[Config] = []
    for_each_job(lambda composed: configs.append(resolve(composed)))
    for config in configs:
        held.enter_context(occupied(Path(config.run_dir)))
        prepare(config)
        note_for_restart(config.run_dir)
        print(f"{config.name}: {os.environ['WORLD_SIZE']} ranks, {shown(Path(config.run_dir))}", flush=True)
    return configs[0].to_yaml() if configs else ""


def _table(jobs: Sequence[Job]) -> list[str]:
    width = max(len(job.overrides) for job in jobs)
    return ["", *(f"{job.overrides:<{width}}  {_outcome(job)}  {job.run_dir}".rstrip() for job in jobs)]


def _outcome(job: Job) -> str:
    if job.exit_code != OK:
        return {FAILED: "failed", WRONG: "refused"}[job.exit_code]
    return "ok" if job.metric is None else f"{job.metric:.6g}"


def _complain(about: SafetrainError | str) -> None:
    print(f"{fresh_line(sys.stderr)}{str(about).rstrip()}", file=sys.stderr, flush=True)
