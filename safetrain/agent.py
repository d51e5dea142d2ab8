"""torch's elastic agent, made to run one machine's ranks of a job: it assigns no ranks, waits for no other agent, and
never restarts. The launchers see to that (crew.py)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from safetrain import machine
from safetrain.alone import Alone
from safetrain.crew import Follower, Leader
from safetrain.failure import Exit, log_end
from safetrain.launch_config import Launch
from safetrain.orders import Share
from safetrain.rank_log import say
from safetrain.signals import Told
from safetrain.whereabouts import Whereabouts

_POLL_S = 0.1  # how late the agent may notice that a rank ended
_KILL_LIMIT_S = 5.0  # from SIGKILL to the end of a process


class OthersEnd(Exception):
    """The ranks of another machine have failed; no rank is left on this one."""


class Agent(LocalElasticAgent):
    """Also tells which ranks ended by themselves, and ends the others in the time they have.

    Left alone torch's gives ranks that ignore SIGTERM 30 s when another one has failed, whatever it was told.

    Attributes:
        exits: the ranks that ended by themselves.
    """

    def __init__(
        self,
        config_file: Path,
        share: Share,
        options: Launch,
        seen: Whereabouts,
        told: Told,
        crew: Alone | Leader | Follower,
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=share.ranks,
            entrypoint=sys.executable,
            args=("-m", "safetrain.rank", str(config_file)),
            rdzv_handler=_Place(share),
            max_restarts=0,
            monitor_interval=_POLL_S,
            local_addr=share.host,
        )
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))
        self.exits: list[Exit] = []
        self._share, self._options, self._seen, self._told, self._crew = share, options, seen, told, crew
        self._run_dir = config_file.parent

    def pids(self) -> list[int]:
        """The ranks' processes, by local rank; empty until they are started."""
        return [] if self._pcontext is None else [pid for _, pid in sorted(self._pcontext.pids().items())]

    def _assign_worker_ranks(self, _store: Store, _node: int, _nodes: int, _spec: WorkerSpec) -> list[Worker]:
        world_size = self._share.world_size
        return [Worker(local, rank, rank, world_size, world_size) for local, rank in enumerate(self._share.numbers)]

    def _exit_barrier(self) -> None:
        """Node 0 waits for the others, where a signal reaches it."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._crew.end_wanted():
            if self._crew.signalled is None:
                raise OthersEnd
            number, _ = self._crew.signalled
            self._told.note(number)
            raise SignalException(f"{number.name} on another machine", number)
        return super()._monitor_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        end_ranks = context.close

        def close(death_sig: signal.Signals | None = None, timeout: float = 0) -> None:
            codes = {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}
            if not self.exits:
                self.exits = [self._exit(rank, pids[rank], code) for rank, code in codes.items() if code is not None]
            if any(code != 0 for code in codes.values()):
                self._crew.ending(self._told.first)
            preempted = self._told.first == signal.SIGTERM
            number = signal.SIGTERM if preempted else signal.SIGUSR2
            limit_s = self._options.preemption_grace_s if preempted else self._options.grace_s
            self._within_limit(lambda: end_ranks(number, limit_s), context, limit_s)  # type: ignore[arg-type]

        context.close = close  # type: ignore[method-assign]  # the only place before the first SIGTERM
        return pids

    def _exit(self, local_rank: int, pid: int, code: int) -> Exit:
        rank, last_seen = self._share.numbers[local_rank], self._seen.last_seen(local_rank)
        if self._share.nodes == 1:
            return Exit(rank, pid, code, last_seen)
        return Exit(rank, pid, code, last_seen, machine.host(), log_end(self._run_dir, rank))

    def _within_limit(self, end_ranks: Callable[[], None], context: SubprocessContext, limit_s: float) -> None:
        """Left alone, torch waits for ever for a process that not even SIGKILL ends."""
        ending = threading.Thread(target=end_ranks, name="safetrain-end-ranks", daemon=True)
        ending.start()
        ending.join(limit_s + _KILL_LIMIT_S)
        if ending.is_alive():
            left = [handler.proc.pid for handler in context.subprocess_handlers.values() if handler.proc.poll() is None]
            say(f"Processes that SIGKILL does not end (they wait in the kernel, for a disk or a device): {left}")


class _Place(RendezvousHandler):
    """Says what the launchers have agreed on: there is nobody to wait for."""

    def __init__(self, share: Share) -> None:
        self._share, self._run_id = share, uuid.uuid4().hex

    @property
    def use_agent_store(self) -> bool:
        return True  # node 0's launcher serves it

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self._share.host, self._share.port)
        return RendezvousInfo(HashStore(), self._share.node, self._share.nodes, place)

    def get_backend(self) -> str:
        return "safetrain"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
