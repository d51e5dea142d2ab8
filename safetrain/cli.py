"""The command line: a job's config is composed and checked once, here, and then ranks are started on it.

    python -m safetrain                           lists the recipes
    python -m safetrain recipe=NAME ...           composes, checks, launches; in a sweep (-m) one job after the other
    python -m safetrain recipe=NAME resume=auto   goes on with the run of that name that was the last to save
    python -m safetrain recipe=NAME launch=cluster ...    the same on each of several machines, with launch.node_rank
    python -m safetrain --version                 which one this is
    torchrun ... -m safetrain recipe=NAME         rank 0 composes and checks, all ranks train; srun and mpirun likewise

Exit codes: 0 all went well, 1 training failed, 2 config or use is wrong, 75 preempted (saved as far as possible: run it
again), 128 + n signal n ended it (Ctrl-C: 130).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain import __version__
from safetrain.catalog import recipes
from safetrain.cluster import folder_of_follower, launch_said, starts_ranks, wants_cluster, with_overrides
from safetrain.errors import ConfigError, SafetrainError, UsageError
from safetrain.orders import FAILED, OK, WRONG
from safetrain.rank_log import complain
from safetrain.run_dir import forget_restart, note_for_restart, occupied, passed_over, run_before_restart, shown
from safetrain.scheduler import placement

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from safetrain.config import Config
    from safetrain.environ import Variable


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    if "--version" in arguments:  # Hydra would tell its own
        print(f"safetrain {__version__}")
        return OK
    try:
        cluster = wants_cluster(os.environ)
        place = None if cluster or starts_ranks(arguments, os.environ) else placement(os.environ)
        if place is not None:
            os.environ.update(place.environment())
            return _as_rank(arguments)
        if not arguments:
            print(list_recipes())
            return OK
        return _as_launcher(with_overrides(arguments, ["launch=cluster"] if cluster else []))
    except (ConfigError, UsageError) as error:
        complain(error)
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


def _as_launcher(arguments: Sequence[str]) -> int:
    """Compose, and start ranks for each job."""
    from safetrain.compose import for_each_job
    from safetrain.sweep import best_found, jobs_noted, table, wait_for_others
    from safetrain.sweep_job import RunJob

    run = RunJob()
    try:
        with folder_of_follower(arguments, os.environ) as more:
            sys.argv = [sys.argv[0], *with_overrides(arguments, more)]
            for_each_job(run)
    except SafetrainError as error:
        if not (run.done or jobs_noted()):  # else it was told when it happened
            _tell_node_0(arguments, str(error))
            raise
    except (RuntimeError, ValueError) as error:  # an engine's: of a process that died, of a search without any value
        if not jobs_noted():
            raise
        complain(f"The sweep ended early: {str(error).partition(chr(10))[0]}")
        wait_for_others()
    jobs = jobs_noted() or run.done
    for job in jobs:
        if job.told and not job.seen:
            complain(f"\n{job.overrides}\n{job.told}")
    if len(jobs) > 1:
        print("\n".join(table(jobs)))
    if best := best_found():
        print(best)
    return next((FAILED if job.exit_code is None else job.exit_code for job in jobs if job.exit_code != OK), OK)


def _tell_node_0(arguments: Sequence[str], text: str) -> None:
    """The config of this machine can't be composed: where there are others, node 0 is not to wait for it."""
    launch = launch_said(arguments, os.environ) if starts_ranks(arguments, os.environ) else None
    if launch is not None and launch.nodes > 1 and launch.number > 0:
        from safetrain.nodes import tell_node_0

        tell_node_0(launch, text)


def _as_rank(arguments: Sequence[str]) -> int:
    """A rank that another launcher started: rank 0 composes for all."""
    from safetrain.compose import variables_said
    from safetrain.config import Config
    from safetrain.environ import apply
    from safetrain.handover import Handover
    from safetrain.lifetime import die_with_parent

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends at once when told to, also inside a collective
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
            except (ConfigError, UsageError) as error:
                handover.end(WRONG, str(error))
                raise
            if not text:
                handover.end(OK)
                return OK
            handover.give(text)
        config = Config.from_yaml(text if handover.rank == 0 else handover.take())
        apply(config.env, variables_said(arguments))
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
    from safetrain.compose import for_each_job, resolve, variables
    from safetrain.environ import announce
    from safetrain.job import prepare

    if run_dir := run_before_restart():
        sys.argv = [argument for argument in sys.argv if not argument.startswith("resume=")] + [f"resume={run_dir}"]
    configs: list[Config] = []
    settled: list[Variable] = []

    def compose(composed: DictConfig) -> None:
        configs.append(resolve(composed, as_rank=True))
        settled.extend(variables(composed))

    for_each_job(compose)
    for config in configs:
        held.enter_context(occupied(Path(config.run_dir)))
        prepare(config)
        note_for_restart(config.run_dir)
        print(f"{config.name}: {os.environ['WORLD_SIZE']} ranks, {shown(Path(config.run_dir))}", flush=True)
        if passed := passed_over(Path(config.run_dir)):
            print(passed, flush=True)
        announce(settled, Path(config.run_dir), started=True)
    return configs[0].to_yaml() if configs else ""
