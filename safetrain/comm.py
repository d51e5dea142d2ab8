"""The door to torch.distributed: join, groups, the store, and the few collectives the loop needs outside the gradients.

Groups of safetrain's own have an explicit time limit (``new_group`` does not inherit one, and Gloo's default is 30
minutes): the default group is the user's, gradients have their own, and the control group (Gloo, on the CPU) carries
agreements. Hybrid sharding adds one for each copy of the model, and one for each shard of it.
A stray user collective can therefore never pair with a gradient bucket or with a vote.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from safetrain import flight_recorder
from safetrain.collectives import CollectiveLog
from safetrain.errors import CommunicationError, UsageError
from safetrain.joining import JOIN_TIMEOUT_S, join_limit_s, meet, part
from safetrain.scheduler import has_a_gpu_of_its_own, placement
from safetrain.sections import Meeting

T = TypeVar("T")
How = Literal["any", "all", "min", "max", "sum"]
_OPS = {"any": dist.ReduceOp.MAX, "all": dist.ReduceOp.MIN, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Comm:
    """One rank's place among the ranks.

    Attributes:
        rank, world_size: over all machines.
        local_rank, local_world_size: on this machine.
        device: where this rank computes.
        ddp_group: the process group of the gradients, used by nothing else.
        store: the key-value store all ranks share; it outlives rank 0 where torch elastic holds it.
        collectives: what user code has issued since the last vote.
        examined: the preflight has looked at the machines of these ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    ddp_group: dist.ProcessGroup
    store: Store
    collectives: CollectiveLog
    examined: bool = False

    _live: Comm | None = None
    _times_joined = 0

    @classmethod
    def join(cls, device: str = "auto", timeout_s: float = 1800.0, join_timeout_s: float = JOIN_TIMEOUT_S) -> Comm:
        """Join the ranks that the launcher started, or be a world of one where none did.

        A second call returns the first one's result. ``timeout_s`` bounds every collective,
        ``join_timeout_s`` the wait for ranks that do not come.

        Raises:
            UsageError: the environment describes the ranks incompletely or inconsistently, or they do not all come.
        """
        if cls._live is None:
            cls._live = cls(device, timeout_s, join_timeout_s)
        return cls._live

    @classmethod
    def live(cls) -> Comm | None:
        """What ``join`` returned, while this process takes part."""
        return cls._live

    def __init__(self, device: str, timeout_s: float, join_timeout_s: float) -> None:
        self.rank, self.world_size, self.local_rank, self.local_world_size = launcher_place()
        self.device = _choose_device(device, self.local_rank)
        self._timeout = timeout = timedelta(seconds=timeout_s)
        flight_recorder.switch_on()
        self._owns_default_group = not dist.is_initialized()
        if self._owns_default_group:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            if (place := placement(os.environ)) is not None:
                os.environ.update(place.environment())
                store = meet(self.rank, self.world_size, join_limit_s(join_timeout_s)).store
                store.set_timeout(timeout)
                dist.init_process_group(
                    backend, timeout=timeout, store=store, rank=self.rank, world_size=self.world_size
                )
            else:
                # a store in memory: one process needs no port and can collide with nobody
                dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
        elif (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.ddp_group = dist.new_group(timeout=timeout, group_desc="safetrain_ddp")
        self._control_group = dist.new_group(timeout=timeout, backend="gloo", group_desc="safetrain_control")
        Comm._times_joined += 1  # what an earlier stay has left in the store must not be read again
        prefix = f"safetrain/{Comm._times_joined}"
        self.store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.collectives = CollectiveLog()
        self.collectives.install([self.ddp_group, self._control_group])
        self._meeting = Meeting(self.store, self.rank, self.world_size, self.collectives, timeout_s)
        self._new_group = dist.new_group
        _set_new_group(self._meeting.checked_new_group(self._new_group))

    def leave(self) -> None:
        """Destroy the groups; only on the clean path, when every rank comes here (on a failure it can itself hang)."""
        Comm._live = None
        self.collectives.remove()
        _set_new_group(self._new_group)
        if self._owns_default_group:
            dist.destroy_process_group()
            part()

    def agree(self, value: T, how: How) -> T:
        """The same value on every rank: ``any``/``all`` of booleans, ``min``/``max``/``sum`` of numbers. All ranks must
        call it."""
        if how != "sum" and how not in _OPS:
            raise UsageError(f"agree(how={how!r}): allowed are any, all, min, max, sum")
        exact = isinstance(value, (bool, int))
        tensor = torch.tensor([value], dtype=torch.int64 if exact else torch.float64)
        dist.all_reduce(tensor, op=_OPS.get(how, dist.ReduceOp.SUM), group=self._control_group)
        return type(value)(tensor.item())  # type: ignore[call-arg]

    def sum_vector(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks in float64; every rank gives as many values."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._control_group)
        return tensor.tolist()

    def start_sum(self, values: torch.Tensor) -> dist.Work:
        """Start to sum ``values`` (a CPU tensor) over ranks in place; wait on what is returned before reading it."""
        work = dist.all_reduce(values, group=self._control_group, async_op=True)
        assert work is not None
        return work

    def gather(self, value: T) -> list[T]:
        """Every rank's picklable value, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control_group)
        return values

    def broadcast(self, value: T, src: int = 0) -> T:
        """Rank ``src``'s picklable value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=src, group=self._control_group)
        return box[0]

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Make ``tensors`` equal to rank ``src``'s, in place."""
        works = [dist.broadcast(tensor, src=src, group=self.ddp_group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    def sum_like_gradients(self, values: torch.Tensor) -> dist.Work:
        """Start to sum ``values`` in place, on the group and the device of the gradients."""
        work = dist.all_reduce(values, group=self.ddp_group, async_op=True)
        assert work is not None
        return work

    def pass_on(self, values: torch.Tensor, received: torch.Tensor) -> list[dist.Work]:
        """Start to send ``values`` to the next rank and to receive the previous one's, on the gradients' group."""
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        exchange = [dist.P2POp(dist.irecv, received, before, self.ddp_group)]
        exchange.append(dist.P2POp(dist.isend, values, after, self.ddp_group))
        return dist.batch_isend_irecv(exchange)

    def mesh(self, replicas: int) -> DeviceMesh:
        """The ranks as rows that each hold one of ``replicas`` copies of the model, sharded over the row. Every rank
        must call it. A copy is on ranks that follow each other, so on as few machines as can be."""
        kind, shards = self.device.type, self.world_size // replicas
        if replicas == 1:
            return DeviceMesh.from_group(self.ddp_group, kind, mesh_dim_names=("shard",))
        ranks = torch.arange(self.world_size).view(replicas, shards)
        groups = [
            self._group_of_mine(of_dimension.tolist(), f"safetrain_{name}")
            for name, of_dimension in (("replicate", ranks.T), ("shard", ranks))
        ]
        self.collectives.own(groups)
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=("replicate", "shard"))

    def _group_of_mine(self, of_ranks: Sequence[list[int]], name: str) -> dist.ProcessGroup:
        """One group for each of ``of_ranks``, made by all ranks in the same order; the one that this rank is in."""
        made = [self._new_group(ranks, timeout=self._timeout, group_desc=name) for ranks in of_ranks]
        return next(group for ranks, group in zip(of_ranks, made, strict=True) if self.rank in ranks)

    def post(self, key: str, text: str) -> None:
        """Leave ``text`` in the store; waits for nobody."""
        self.store.set(key, text)

    def read(self, key: str) -> str | None:
        """What some rank posted under ``key``, or None; waits for nobody."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def clone_store(self, prefix: str) -> Store:
        """A connection of its own to the store, for another thread: on this rank's it would wait behind the rank."""
        return PrefixStore(f"safetrain/{prefix}", dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]

    def barrier(self, name: str = "", limit_s: float | None = None) -> None:
        """Return when every rank has come to the barrier of this ``name``, within ``limit_s`` (default: the time limit
        of collectives). It carries no value: for a decision that all ranks share, use ``agree``.

        Raises:
            RanksDiffer: on all ranks, when some came to a barrier of another name.
            PeerFailed: naming the ranks that did not come.
        """
        self._meeting.barrier(name, limit_s)

    def rank_zero(self, name: str, limit_s: float = 600.0) -> AbstractContextManager[bool]:
        """A section for rank 0 alone; all ranks enter it, and the others wait at its end, on the store.

            with comm.rank_zero("export", limit_s=600) as mine:
                if mine:
                    write(path)

        Raises:
            RankFailed, PeerFailed: the block raised on rank 0: on all ranks, with the line.
            UsageError: the block issued a collective.
        """
        return self._meeting.rank_zero(name, limit_s)

    def turn(self, name: str, whose: int) -> Callable[[], None]:
        """Wait until rank ``whose`` has ended its turn, however long that takes; on that rank, what ends it."""
        return self._meeting.turn(name, whose)


def serve_store(timeout: timedelta, host: str = "127.0.0.1") -> tuple[Store, int]:
    """A store for ranks, served by this process on a free port of ``host``, which is this machine; and its port."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, store.port


def _set_new_group(new_group: Any) -> None:
    """Make it the one that user code calls, whichever way."""
    dist.new_group = dist.distributed_c10d.new_group = new_group


def is_communication_error(error: BaseException) -> bool:
    """Whether ``error`` comes from a collective. Gloo raises bare RuntimeErrors that can only be told by their text."""
    if isinstance(error, (dist.DistError, CommunicationError)):
        return True
    return isinstance(error, RuntimeError) and ("gloo/transport" in str(error) or "NCCL" in str(error))


def launcher_place() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size) from the launcher's environment; a world of one without it."""
    place = placement(os.environ)
    if place is None:
        return 0, 1, 0, 1
    return place.rank, place.world_size, place.local_rank, place.local_world_size


def _choose_device(device: str, local_rank: int) -> torch.device:
    """One GPU a rank where there are GPUs, else the CPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device={device!r}: allowed are auto, cpu, cuda (the rank's own index is added)")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and has_a_gpu_of_its_own(os.environ):
        local_rank = 0
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no GPU: {count} visible. Set launch.nproc_per_node={count} or device=cpu."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
