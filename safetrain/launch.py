"""Start the ranks of this machine on torch's elastic agent, and see to it that none outlives the job.

The parent is never a rank. The agent runs each rank as a command of its own, around a store on a free port of this
machine, so two jobs cannot collide; it never restarts a rank. A signal to the parent, the first failed rank, or the
parent's own end (whatever its cause) ends all ranks: a signal, ``grace_s``, SIGKILL. Only SIGTERM to the parent is
passed on as SIGTERM: the ranks then save before they go (preemption.py). Else they get SIGUSR2, which ends them at
once: nobody handles it, as Python does with SIGINT, or ignores it, as nohup does with SIGHUP.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from safetrain.comm import launcher_place
from safetrain.config import Config, Launch
from safetrain.environ import environment
from safetrain.errors import ConfigError, UsageError
from safetrain.failure import Exit
from safetrain.preemption import ECHO_S
from safetrain.rank import PARENT_PID
from safetrain.rank_log import say
from safetrain.whereabouts import Whereabouts

_HERE = "127.0.0.1"
_RANKS_WITHOUT_GPU = 2
_POLL_S = 0.1  # how late the agent may notice that a rank ended
_KILL_LIMIT_S = 5.0  # from SIGKILL to the end of a process
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal ended the job; no rank is left."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended.

    Attributes:
        ok: all of them did their work and left with exit code 0.
        exits: the ranks that ended by themselves, before the launcher ended the others.
    """

    ok: bool
    exits: list[Exit]


def number_of_ranks(config: Config) -> int:
    """How many ranks ``config`` asks for on this machine.

    Raises:
        ConfigError: there are fewer GPUs than that.
    """
    asked = config.launch.nproc_per_node
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and gpus == 0:
        raise ConfigError("device=cuda: torch sees no GPU on this machine. Allowed here: auto, cpu.")
    if asked == "auto":
        return gpus or _RANKS_WITHOUT_GPU
    if gpus and asked > gpus:
        raise ConfigError(
            f"launch.nproc_per_node={asked}: each rank needs a GPU of its own. Allowed here: auto, 1-{gpus}; "
            "any number with device=cpu."
        )
    return asked


def launch(config_file: Path, ranks: int, *, options: Launch, env: Mapping[str, str]) -> Ended:
    """Run ``safetrain.rank`` on ``config_file`` in ``ranks`` processes, with ``env`` added to their environment.

    Returns when all have ended. Call it in the main thread.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP ended the job.
    """
    _silence_agent()
    own = {
        PARENT_PID: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // ranks))),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # signals are handled here
    }
    parameters = RendezvousParameters("c10d", f"{_HERE}:0", uuid.uuid4().hex, 1, 1, local_addr=_HERE, is_host=True)
    with Whereabouts.open() as seen, environment({**own, **seen.environment, **env}), _signals_end_the_job() as told:
        handler = get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            entrypoint=sys.executable,
            args=("-m", "safetrain.rank", str(config_file)),
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=_POLL_S,
            local_addr=_HERE,
        )
        agent = _Agent(spec, options, seen, told)
        with _stacks_on_request(agent, seen):
            try:
                state = agent.run().state
            finally:
                handler.shutdown()
    return Ended(state is WorkerState.SUCCEEDED, agent.exits)


class _Agent(LocalElasticAgent):
    """torch's agent, which also tells which ranks ended by themselves, and ends the others in the time they have.

    Left alone it gives ranks that ignore SIGTERM 30 s when another one has failed, whatever it was told. ``told``: the
    signals that the launcher has got.
    """

    def __init__(self, spec: WorkerSpec, options: Launch, seen: Whereabouts, told: Sequence[signal.Signals]) -> None:
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))
        self.exits: list[Exit] = []
        self._options, self._seen, self._told = options, seen, told

    def pids(self) -> list[int]:
        """The ranks' processes, by local rank; empty until they are started."""
        return [] if self._pcontext is None else [pid for _, pid in sorted(self._pcontext.pids().items())]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        end_ranks = context.close

        def close(death_sig: signal.Signals | None = None, timeout: float = 0) -> None:
            if not self.exits:
                codes = {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}
                self.exits = [
                    Exit(rank, pids[rank], code, self._seen.last_seen(rank))
                    for rank, code in codes.items()
                    if code is not None
                ]
            preempted = signal.SIGTERM in self._told
            number = signal.SIGTERM if preempted else signal.SIGUSR2
            limit_s = self._options.preemption_grace_s if preempted else self._options.grace_s
            self._within_limit(lambda: end_ranks(number, limit_s), context, limit_s)  # type: ignore[arg-type]

        context.close = close  # type: ignore[method-assign]  # the only place before the first SIGTERM
        return pids

    def _within_limit(self, end_ranks: Callable[[], None], context: SubprocessContext, limit_s: float) -> None:
        """Left alone, torch waits for ever for a process that not even SIGKILL ends."""
        ending = threading.Thread(target=end_ranks, name="safetrain-end-ranks", daemon=True)
        ending.start()
        ending.join(limit_s + _KILL_LIMIT_S)
        if ending.is_alive():
            left = [handler.proc.pid for handler in context.subprocess_handlers.values() if handler.proc.poll() is None]
            say(f"Processes that SIGKILL does not end (they wait in the kernel, for a disk or a device): {left}")


def _silence_agent() -> None:
    """Keep the agent's log to itself: what it has to say is in the summary, in words."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


@contextmanager
def _stacks_on_request(agent: _Agent, seen: Whereabouts) -> Iterator[None]:
    """``kill -USR1`` of this process prints where every rank is, and stops nothing."""

    def tell(_number: int, _frame: FrameType | None) -> None:
        say(seen.tell(agent.pids()) or "The ranks are being started.")

    before = signal.signal(signal.SIGUSR1, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def _signals_end_the_job() -> Iterator[list[signal.Signals]]:
    """The first signal ends the job; a second one leaves at once, and the kernel then kills the ranks. Yields what was
    received."""
    received: list[signal.Signals] = []

    first_at = 0.0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal first_at
        if received == [number] == [signal.SIGTERM] and time.monotonic() - first_at < ECHO_S:
            return  # a scheduler told the whole job, and its script tells the launcher again
        first_at = first_at or time.monotonic()
        if received:
            os.write(2, b"\nInterrupted again; the ranks are killed.\n")
            os._exit(128 + number)
        received.append(signal.Signals(number))
        raise SignalException(f"got signal {number}", signal.SIGTERM)

    # a signal that is ignored stays so: nohup, and background jobs of a shell script, count on it
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in handled}
    try:
        yield received
    except SignalException:
        raise Interrupted(received[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def has_launcher() -> bool:
    """Whether torchrun or another launcher has started this process as a rank.

    Raises:
        UsageError: the environment is one that no single launcher makes.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        launcher_place()
        return True
    for tasks in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        count = os.environ.get(tasks, "1")
        if count != "1":
            raise UsageError(
                f"{tasks}={count}: srun or mpirun started {count} copies of this command, and each would start "
                "ranks of its own. Start one task, or let each task run torchrun."
            )
    return False
