"""How ranks find each other, within seconds or with the reason why not: who is missing, who is there twice.

Every process enters its place in a list in the store. Rank 0 reads the list until all ranks are in it or the time is
up, and leaves its verdict, which the others wait for. So a rank that never came is named by all that did, and nobody
waits half an hour in ``init_process_group``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from safetrain import machine, network
from safetrain.errors import UsageError, together
from safetrain.words import ranks_in_words

JOIN_TIMEOUT_S = 20.0
_WATCHED_LIMIT_S = 120.0  # under an elastic agent every process exists, and its end is seen: only imports may differ
_LOOK_EVERY_S = 0.02
_READ_LIMIT_S = 5.0  # how long rank 0, whose process may hold the store, stays for the others to read the verdict
_SLACK_S = 5.0


@dataclass(frozen=True)
class Place:
    """Who a process says it is; ``machine`` tells two machines, or two pods, of one name apart."""

    rank: int
    world_size: int
    host: str
    pid: int
    gloo_address: str
    machine: str = ""

    @property
    def is_here(self) -> bool:
        """Whether this process sees that one by its process id."""
        return self.machine == machine.identity()

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Meeting:
    """All ranks have come.

    Attributes:
        store: the store they share, fresh for this meeting.
        places: by rank.
    """

    store: Store
    places: tuple[Place, ...]


_server: Store | None = None  # one a process: rank 0 may serve it
_current: Meeting | None = None
_meetings = 0


def meet(rank: int, world_size: int, limit_s: float, *, for_gloo: bool = True) -> Meeting:
    """Find the other ranks; a second call, until ``part``, returns the first one's result. ``for_gloo``: refuse what
    Gloo can't go through.

    Raises:
        UsageError: a rank is missing or there twice, the ranks don't agree on their number, the address is wrong or
            taken. All ranks that can be reached raise it, with the same words.
    """
    global _current, _meetings
    if _current is None:
        if for_gloo:
            network.check_gloo_interfaces()
        deadline = time.monotonic() + limit_s
        base = _find_store(rank, limit_s)
        _meetings += 1
        store = PrefixStore(f"safetrain/meeting_{_meetings}", base)
        me = Place(rank, world_size, machine.host(), os.getpid(), network.gloo_address(), machine.identity())
        try:
            places = _roll_call(PrefixStore("roll", store), me, deadline, limit_s, for_gloo)
        except dist.DistError as error:
            raise UsageError(f"rank {rank}: the store of all ranks, which rank 0 serves, is gone.") from error
        _current = Meeting(store, places)
    return _current


def part() -> None:
    """The ranks go apart; the next ``meet`` is a new meeting."""
    global _current
    _current = None


def connection(prefix: str) -> Store:
    """To the store of those who have met, for another thread."""
    assert _current is not None
    return PrefixStore(prefix, _current.store.clone())  # type: ignore[attr-defined]


def known_places() -> tuple[Place, ...]:
    """All ranks' places, by rank; empty where they did not meet here."""
    return () if _current is None else _current.places


def join_limit_s(asked_s: float) -> float:
    """How long to wait for ranks that were asked to come within ``asked_s``."""
    return max(asked_s, _WATCHED_LIMIT_S) if _agent_serves() else asked_s


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _find_store(rank: int, limit_s: float) -> Store:
    """The store that rank 0, or the elastic agent, serves at MASTER_ADDR:MASTER_PORT."""
    global _server
    if _server is not None:
        return _server
    host, port = os.environ["MASTER_ADDR"], _port()
    addresses = network.resolve("MASTER_ADDR", host)
    where = f"{host}:{port}" + (f" ({', '.join(addresses)})" if addresses != [host] else "")
    serves = rank == 0 and not _agent_serves()
    if not serves and (error := network.reach(host, port, limit_s)):
        raise UsageError(
            f"rank {rank} on {machine.host()} found nobody at {where} for {limit_s:g} s: {error}. Rank 0 has to "
            "run on the machine that MASTER_ADDR names, with the same MASTER_PORT, and no firewall between."
        )
    try:
        store = _open_store(host, port, serves, limit_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(_no_store(rank, where, host, port, serves=serves, error=error)) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _server = PrefixStore(f"attempt_{attempt}", store)
    return _server


def _open_store(host: str, port: int, serves: bool, limit_s: float) -> Store:
    """In a thread, since torch waits without a limit for the first answer of a stranger."""
    opened: list[Store | Exception] = []

    def open_it() -> None:
        limit = timedelta(seconds=limit_s)
        try:
            # multi_tenant: a guarded script opens one at the same port, and gets this server
            store = TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit, multi_tenant=True)
            opened.append(store)
        except (RuntimeError, ValueError) as error:
            opened.append(error)

    thread = threading.Thread(target=open_it, name="safetrain-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not opened:
        raise TimeoutError(f"no answer for {limit_s:g} s")
    if isinstance(opened[0], Exception):
        raise opened[0]
    return opened[0]


def _no_store(rank: int, where: str, host: str, port: int, *, serves: bool, error: Exception) -> str:
    holder = network.port_holder(port)
    if serves and holder:
        return (
            f"port {port} on {machine.host()}, where rank 0 is to meet the others, is taken by {holder}. Choose "
            "another MASTER_PORT, or end that process. If it belongs to this job, two processes have RANK=0."
        )
    if serves and not network.is_own_address(host):
        return (
            f"MASTER_ADDR={host}: that is not {machine.host()}, where rank 0 runs, so nobody can meet it there. "
            "Set MASTER_ADDR to this machine's name or address, on all ranks."
        )
    if not serves:
        who = holder or "a program"
        return (
            f"rank {rank}: {who} listens at {where}, but it is not rank 0 of a training job. Choose another "
            "MASTER_PORT, the same on all ranks."
        )
    return f"rank {rank} could not open the store at {where}: {str(error).partition(chr(10))[0]}"


def _port() -> int:
    text = os.environ["MASTER_PORT"]
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise UsageError(f"MASTER_PORT={text!r}: must be a whole number, 1-65535")
    return int(text)


def _roll_call(store: Store, me: Place, deadline: float, limit_s: float, for_gloo: bool) -> tuple[Place, ...]:
    number = store.add("arrivals", 1)
    store.set(f"arrival_{number}", json.dumps(asdict(me)))
    if me.rank == 0:
        wrong, places = _await_all(store, me, deadline, limit_s)
        wrong = wrong or (_unreachable(places) if for_gloo else "")
        verdict = {"wrong": wrong, "places": [asdict(place) for place in places]}
        store.compare_set("verdict", "", json.dumps(verdict))
    else:
        try:
            store.wait(["verdict"], timedelta(seconds=max(0.1, deadline - time.monotonic()) + _SLACK_S))
        except dist.DistStoreError as error:
            raise UsageError(
                f"{me} found the store, but rank 0 did not come within {limit_s:g} s: look for what holds it up, or "
                "raise launch.join_timeout_s."
            ) from error
    verdict = json.loads(store.get("verdict"))
    store.set(f"read_{number}", "")
    if verdict["wrong"]:
        if me.rank == 0:
            with suppress(dist.DistStoreError):
                # who has not come by now is still to come, unless it was waited for long enough
                readers = store.add("arrivals", 0)
                readers = readers if time.monotonic() > deadline else max(readers, me.world_size)
                store.wait([f"read_{n}" for n in range(1, readers + 1)], timedelta(seconds=_READ_LIMIT_S))
        raise together(UsageError(verdict["wrong"]))
    places = [Place(**place) for place in verdict["places"]]
    if me not in places:
        raise UsageError(_twice(places[me.rank] if me.rank < len(places) else None, me))
    return tuple(places)


def _await_all(store: Store, me: Place, deadline: float, limit_s: float) -> tuple[str, list[Place]]:
    """Rank 0 reads the list of arrivals: what is wrong, in words, or every rank's place."""
    places: dict[int, Place] = {}
    number = 1
    while len(places) < me.world_size:
        if store.check(["verdict"]):  # two processes have RANK=0, and the other one came to an end first
            return "", []
        if not store.check([f"arrival_{number}"]):  # store.wait would warn of each look that finds nothing
            if time.monotonic() > deadline:
                return _missing(me, places, limit_s), []
            time.sleep(_LOOK_EVERY_S)
            continue
        place = Place(**json.loads(store.get(f"arrival_{number}")))
        number += 1
        if place.world_size != me.world_size:
            return (
                f"{place} was started with WORLD_SIZE={place.world_size}, rank 0 with {me.world_size}: let one "
                "launcher set RANK and WORLD_SIZE on all machines."
            ), []
        if place.rank in places:
            return _twice(places[place.rank], place), []
        places[place.rank] = place
    ordered = [places[rank] for rank in range(me.world_size)]
    return "", ordered


def _missing(me: Place, places: dict[int, Place], limit_s: float) -> str:
    missing = [rank for rank in range(me.world_size) if rank not in places]
    shown = ", ".join(str(places[rank]) for rank in sorted(places)[:8]) + (", ..." if len(places) > 8 else "")
    return (
        f"{ranks_in_words(missing)} of {me.world_size} did not come within {limit_s:g} s. Here are {shown}, at "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}. Was it started, and with the same MASTER_ADDR and "
        "MASTER_PORT? If it only starts slowly, raise launch.join_timeout_s."
    )


def _twice(first: Place | None, second: Place) -> str:
    there = f"process {first.pid} on {first.host}" if first else "nobody"
    return (
        f"two processes have RANK={second.rank}: {there} and process {second.pid} on {second.host}. A program that a "
        "launcher had started has started ranks itself (spawn inside torchrun, or ranks set by hand). Use one launcher."
    )


def _unreachable(places: list[Place]) -> str:
    """Ranks on several machines must not offer Gloo an address that only means their own."""
    hosts = {place.machine or place.host for place in places}
    hidden = next((place for place in places if network.is_loopback(place.gloo_address)), None)
    if len(hosts) == 1 or hidden is None:
        return ""
    return (
        f"{hidden} would tell the others to find it at {hidden.gloo_address}, which on their machines means "
        f"themselves: /etc/hosts maps the name {hidden.host} to it. Set GLOO_SOCKET_IFNAME to the interface between "
        "the machines, on all ranks (`ip addr` lists them)."
    )
