"""Checks of who is here, and of how ranks find each other: numbers, interfaces, names of addresses."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from safetrain import network
from safetrain.finding import Finding, Here, Said, groups, of_hosts, ranks_of, spread, where
from safetrain.words import ranks_in_words

_SLOW_LOOKUP_S = 0.5
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Ranks:
    """The ranks' numbers fit together, each process is one rank, and which interface Gloo goes through."""

    name: str = "ranks"

    def look(self, here: Here) -> dict[str, Any]:
        comm = here.comm
        return {
            "rank": comm.rank,
            "world_size": comm.world_size,
            "local_rank": comm.local_rank,
            "local_world_size": comm.local_world_size,
            "pid": os.getpid(),
            "interface": interface(),
        }

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        findings = [*self._numbers(said), *self._processes(said), *self._local_numbers(said)]
        if findings:
            return findings
        ranks, hosts = len(said), len(of_hosts(said))
        count = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} machine{'s' * (hosts > 1)}"
        return [Finding(self.name, f"{count}; {spread(said, lambda facts: facts['interface'])}")]

    def _numbers(self, said: Sequence[Said]) -> Iterator[Finding]:
        for one in said:
            claims = one.facts["rank"], one.facts["world_size"]
            if claims != (one.rank, len(said)):
                value = f"rank {claims[0]} of {claims[1]}"
                words = f"rank {one.rank} of {len(said)} takes itself for {value}."
                yield Finding(self.name, value, "refuse", (one.rank,), words, "Let one launcher set RANK, WORLD_SIZE.")

    def _processes(self, said: Sequence[Said]) -> Iterator[Finding]:
        processes: dict[tuple[str, int], list[Said]] = {}
        for one in said:
            processes.setdefault((one.host, one.facts["pid"]), []).append(one)
        for (host, pid), some in processes.items():
            if len(some) > 1:
                words = f"{ranks_in_words(ranks_of(some))} are one process, {pid} on {host}."
                remedy = "Give containers their own host names, or start each rank in a process of its own."
                yield Finding(self.name, f"process {pid}", "refuse", ranks_of(some), words, remedy)

    def _local_numbers(self, said: Sequence[Said]) -> Iterator[Finding]:
        remedy = "Let the launcher set LOCAL_RANK and LOCAL_WORLD_SIZE: a rank takes its GPU by that number."
        for some in of_hosts(said):
            taken = Counter(one.facts["local_rank"] for one in some)
            place = where(some, said)
            for number in sorted(number for number, times in taken.items() if times > 1):
                twice = ranks_of([one for one in some if one.facts["local_rank"] == number])
                words = f"{ranks_in_words(twice)} on {place} all have LOCAL_RANK={number}."
                yield Finding(self.name, f"LOCAL_RANK={number} twice", "refuse", twice, words, remedy)
            for told in groups(some, lambda facts: facts["local_world_size"]):
                if told != len(some):
                    words = f"LOCAL_WORLD_SIZE={told} on {place}, where {len(some)} of the ranks run."
                    yield Finding(self.name, f"LOCAL_WORLD_SIZE={told}", "warn", ranks_of(some), words, remedy)


@dataclass(frozen=True)
class NameLookup:
    """The name server answers: torch's store asks it for the name of each rank that connects."""

    name: str = "name_lookup"

    def look(self, here: Here) -> dict[str, Any]:
        if "MASTER_ADDR" not in os.environ:
            return {"address": "", "seconds": 0.0}
        address = own_address(os.environ["MASTER_ADDR"])
        return {"address": address, "seconds": lookup_s(address, here.options.name_lookup_s)}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        slow = [one for one in said if one.facts["seconds"] > _SLOW_LOOKUP_S]
        if not slow:
            longest_s = max(one.facts["seconds"] for one in said)
            return [Finding(self.name, f"{1000 * longest_s:.0f} ms" if said[0].facts["address"] else "not needed")]
        findings = []
        for address, some in groups(slow, lambda facts: facts["address"]).items():
            seconds = max(one.facts["seconds"] for one in some)
            words = (
                f"the name of {address} is looked up for {seconds:.1f} s or more on {where(some, said)}, and the store "
                "does so for every rank that connects: the start takes longer by as much."
            )
            remedy = (
                f"Add a line '{address.removeprefix('::ffff:')} {some[0].host}' to /etc/hosts, or set "
                "RES_OPTIONS='timeout:1 attempts:1' before the launcher starts."
            )
            findings.append(Finding(self.name, f"{seconds:.1f} s", "warn", ranks_of(some), words, remedy))
        return findings


def lookup_s(address: str, limit_s: float, look_up: Callable[[str], object] | None = None) -> float:
    """Seconds until the name server has said how ``address`` is called, or that it does not know; at most
    ``limit_s``."""
    done = threading.Event()

    def ask() -> None:
        with suppress(OSError):
            (look_up or _look_up)(address)
        done.set()

    begin = time.monotonic()
    threading.Thread(target=ask, name="safetrain-name-lookup", daemon=True).start()
    return time.monotonic() - begin if done.wait(limit_s) else limit_s


def _look_up(address: str) -> object:
    return socket.getnameinfo((address, 0, 0, 0) if ":" in address else (address, 0), 0)


def own_address(server: str) -> str:
    """The address of this machine that ``server`` sees, as torch's store sees it: of version 6 in any case."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(server, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return ""
    return address if ":" in address else f"::ffff:{address}"


def interface() -> str:
    """Where Gloo listens on this machine and why, such as ``lo (127.0.0.1), by the machine's name``."""
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        return f"{chosen}, by GLOO_SOCKET_IFNAME"
    address = network.gloo_address()
    names = [name for name, one in addresses() if one == address]
    return f"{names[0] if names else 'an interface'} ({address}), by the machine's name"


def addresses() -> Iterator[tuple[str, str]]:
    """Each interface of this machine that has an address of version 4, with it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = struct.pack("256s", name[:15].encode())
                yield name, socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
