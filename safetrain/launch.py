"""Start the ranks of this machine on torch's elastic agent, and see to it that none outlives the job.

The parent is never a rank. The agent runs each rank as a command of its own and never restarts one; all ranks meet at a
store that node 0's launcher serves on a free port, so two jobs cannot collide. A signal to the parent, the first failed
rank on any machine, or the parent's own end (whatever its cause) ends all ranks: a signal, ``grace_s``, SIGKILL. Only
SIGTERM to the parent is passed on as SIGTERM: the ranks then save before they go (preemption.py). Else they get
SIGUSR2, which ends them at once: nobody handles it, as Python does with SIGINT, or ignores it, as nohup does with
SIGHUP.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from safetrain.agent import Agent, OthersEnd
from safetrain.alone import Alone
from safetrain.config import Config
from safetrain.crew import Follower, Leader
from safetrain.environ import environment
from safetrain.errors import ConfigError
from safetrain.failure import Exit
from safetrain.launch_config import Launch
from safetrain.orders import Share
from safetrain.rank import PARENT_PID
from safetrain.rank_log import say
from safetrain.signals import signals_end_the_job
from safetrain.whereabouts import Whereabouts

_RANKS_WITHOUT_GPU = 2


@dataclass(frozen=True)
class Ended:
    """How this machine's ranks of a job ended.

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
    config.profile.check_device(gpus=gpus > 0)
    if asked == "auto":
        return gpus or _RANKS_WITHOUT_GPU
    if gpus and asked > gpus:
        raise ConfigError(
            f"launch.nproc_per_node={asked}: each rank needs a GPU of its own. Allowed here: auto, 1-{gpus}; "
            "any number with device=cpu."
        )
    return asked


def launch(
    config_file: Path, share: Share, crew: Alone | Leader | Follower, *, options: Launch, env: Mapping[str, str]
) -> Ended:
    """Run ``safetrain.rank`` on ``config_file`` in a process for each rank of ``share``, with ``env`` added to their
    environment; ``crew`` are the launchers of other machines.

    Returns when all have ended. Call it in the main thread.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP, to a launcher of the crew, ended the job.
    """
    _silence_agent()
    own = {
        PARENT_PID: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // share.ranks))),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # signals are handled here
    }
    with (
        Whereabouts.open() as seen,
        environment({**own, **seen.environment, **env}),
        signals_end_the_job(SignalException) as told,
    ):
        agent = Agent(config_file, share, options, seen, told, crew)
        with _stacks_on_request(agent, seen, share.first_rank):
            try:
                state = agent.run().state
            except OthersEnd:
                state = WorkerState.FAILED
    return Ended(state is WorkerState.SUCCEEDED, agent.exits)


def _silence_agent() -> None:
    """Keep the agent's log to itself: what it has to say is in the summary, in words."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


@contextmanager
def _stacks_on_request(agent: Agent, seen: Whereabouts, first_rank: int) -> Iterator[None]:
    """``kill -USR1`` of this process prints where every rank is, and stops nothing."""

    def tell(_number: int, _frame: FrameType | None) -> None:
        say(seen.tell(agent.pids(), first_rank) or "The ranks are being started.")

    before = signal.signal(signal.SIGUSR1, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
