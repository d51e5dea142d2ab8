"""One training job of a command, wherever it runs: in the command's own process, or where an engine of Hydra put it."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from safetrain.compose import (
    job_overrides,
    keys_of,
    launch_of,
    no_run_dir_if_refused,
    resolve,
    variables,
    variables_said,
)
from safetrain.config import Config
from safetrain.crew import Follower, Leader, crew_of
from safetrain.environ import Variable, environment
from safetrain.errors import ConfigError, Preempted, SafetrainError, UsageError
from safetrain.marked import marked_output
from safetrain.orders import OK, JobEnded, TrainingFailed, exit_code_of
from safetrain.part_of_machine import (
    forget_threads_of_engine,
    number_at_once,
    number_of_cores,
    part_of_gpus,
    threads_of_rank,
    threads_of_user,
    visible_gpus,
)
from safetrain.rank_log import complain
from safetrain.run_dir import shown
from safetrain.sweep import COMMAND, SUBMITIT, Folder, Job
from safetrain.user_path import search_user_code_last

_TAKES_ALL = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_dies_with: set[Path] = set()  # the sweeps with which this process ends


class RunJob:
    """Hydra calls it for each job, with its composed config; an engine pickles it for another process."""

    def __init__(self) -> None:
        self.done: list[Job] = []  # of this process
        self._command, self._home = COMMAND, (os.getpid(), os.uname().nodename)
        self._threads = threads_of_user()

    def __call__(self, composed: DictConfig) -> float | None:
        hydra = HydraConfig.get()
        job = Job.here(job_overrides(), self._command)
        self.done.append(job)
        if hydra.mode is not RunMode.MULTIRUN:
            return _run(composed, job, lambda: None)
        folder, number = Folder(str(hydra.sweep.dir)), int(hydra.job.num)
        if folder.is_ending():
            raise UsageError("the sweep was told to end before this job began")
        with ExitStack() as held:
            held.enter_context(folder.held(str(number), wait=False))
            cores = None
            if (job.process, job.host) != self._home:
                cores = self._settle_in(folder, number, job, composed, held)
            before = folder.noted(number)
            before = before if before is not None and before.overrides == job.overrides else None
            if before is not None and before.exit_code == OK and folder.goes_on():
                folder.note(number, replace(before, command=self._command))
                return before.metric
            folder.note(number, job)
            try:
                return _run(composed, job, lambda: folder.note(number, job), before, cores)
            except SystemExit:
                if (job.process, job.host) == self._home:
                    folder.end()
                elif SUBMITIT not in os.environ:  # joblib would end the others, which may still have to save
                    raise TrainingFailed(job.told) from None
                raise
            finally:
                folder.note(number, job)

    def _settle_in(self, folder: Folder, number: int, job: Job, composed: DictConfig, held: ExitStack) -> int | None:
        """Make a process of an engine fit for a job; returns how many cores are the job's, where that is known."""
        search_user_code_last()
        forget_threads_of_engine(self._threads)
        engine = os.environ.get(SUBMITIT)
        if job.host == self._home[1] and engine != "slurm" and folder.sweep_dir not in _dies_with:
            _dies_with.add(folder.sweep_dir)
            folder.die_with_sweep()
        launcher = HydraConfig.get().launcher
        if engine is not None:
            held.enter_context(_submitit_asks_for_a_save())
            return launcher.get("cpus_per_task")
        held.enter_context(marked_output(f"[job {number}] "))
        at_once = number_at_once(int(launcher.get("n_jobs", 1)))
        import torch  # takes seconds: not before the launchers of several machines have met

        gpus = [] if composed.device == "cpu" else visible_gpus(torch.cuda.device_count())
        held.enter_context(part_of_gpus(folder, at_once, gpus))
        return number_of_cores() // at_once


def _run(
    composed: DictConfig, job: Job, note: Callable[[], None], before: Job | None = None, cores: int | None = None
) -> float | None:
    """Train; ``before``: what is noted of the same job from an earlier time."""
    try:
        launch = launch_of(composed)
        with ExitStack() as held:
            with no_run_dir_if_refused():
                crew = held.enter_context(crew_of(launch, keys_of(composed)))
            config = resolve(composed)  # from here on, imports take seconds
            if isinstance(crew, Follower):
                from safetrain.follow import follow

                job.metric = follow(config, crew, variables_said(job.overrides.split(" ")))
            else:
                job.metric = _lead(config, variables(composed), crew, job, note, before, cores)
        _check_metric(config, job.metric)
    except JobEnded as ended:
        job.exit_code, job.told = ended.exit_code, _in_words_of_a_sweep(str(ended))
        complain(job.told)
        raise SystemExit(ended.exit_code) from None  # no Exception: it ends a sweep, too
    except SafetrainError as error:
        job.exit_code = exit_code_of(error)
        job.told = str(error)
        complain(error)
        raise
    job.exit_code = OK
    return job.metric


def _lead(
    config: Config,
    settled: Sequence[Variable],
    crew: Leader | None,
    job: Job,
    note: Callable[[], None],
    before: Job | None,
    cores: int | None,
) -> float | None:
    """Train on this machine, and on those of ``crew``."""
    from safetrain.job import train
    from safetrain.launch import number_of_ranks
    from safetrain.machines import agree

    _check_engine(config)
    if crew is not None:
        with no_run_dir_if_refused():
            agree(config, crew)
    job.run_dir = shown(Path(config.run_dir))
    note()
    if before is not None and _was_cut(before, config):
        print(f"{config.name}: goes on where it was cut.", flush=True)
        config = replace(config, resume="auto")
    with environment(threads_of_rank(cores, number_of_ranks(config))):
        return train(config, settled, crew)


def _in_words_of_a_sweep(text: str) -> str:
    """resume=auto is refused in a sweep, which has a way of its own to go on."""
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN:
        return text
    return text.replace("resume=auto", f"hydra.sweep.dir={shown(Path(hydra.sweep.dir).resolve())}")


def _was_cut(before: Job, config: Config) -> bool:
    """Whether a job is started again that was preempted or killed, and had saved something."""
    cut = before.exit_code in (None, Preempted.EXIT_CODE)
    return cut and config.resume == "none" and any(Path(config.run_dir, "checkpoints").glob("step_*"))


def _check_engine(config: Config) -> None:
    if _sweeper_chooses() and config.metric is None:
        raise ConfigError(
            "metric=null: the sweeper chooses by it. Say metric=NAME of a value that validation logs, such as val/loss."
        )
    launcher = HydraConfig.get().launcher
    for key in ("nodes", "tasks_per_node"):
        if SUBMITIT in os.environ and launcher.get(key, 1) != 1:
            raise ConfigError(
                f"hydra.launcher.{key}={launcher[key]}: each of these tasks would be the whole job. Say 1; "
                "launch.nproc_per_node says how many ranks the one task starts."
            )
    no_gpu = os.environ.get(SUBMITIT) == "local" and os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if no_gpu and config.device != "cpu" and Path("/dev/nvidiactl").exists():
        raise ConfigError(
            "submitit gives a local job no GPU of this machine unless it is told so: say "
            "hydra.launcher.gpus_per_node=N, or device=cpu."
        )


def _check_metric(config: Config, metric: float | None) -> None:
    if metric is not None and math.isnan(metric) and _sweeper_chooses():
        raise TrainingFailed(f"{config.metric} is NaN at the end: for the sweeper this job has failed")


def _sweeper_chooses() -> bool:
    hydra = HydraConfig.get()
    return hydra.mode is RunMode.MULTIRUN and hydra.sweeper._target_ != _TAKES_ALL


@contextmanager
def _submitit_asks_for_a_save() -> Iterator[None]:
    """Before its time is over, submitit gets a signal and puts the job into the queue again: save before that."""
    number = signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]
    requeue = signal.getsignal(number)
    asked = False

    def save(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(number, save)
    try:
        yield
    except SystemExit as ended:
        if asked and ended.code == Preempted.EXIT_CODE and callable(requeue):
            requeue(number, None)
        raise
    finally:
        signal.signal(number, requeue)
