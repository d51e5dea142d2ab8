"""How the launchers of a job on several machines find each other, before any of them starts a rank.

Node 0's launcher listens at ``launch.rdzv_endpoint``; the others connect and introduce themselves. Node 0 compares: who
is missing, who is there twice, whose config is not the same. What is wrong is told on all terminals in the same words.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from safetrain import machine, network
from safetrain.errors import UsageError
from safetrain.launch_config import Launch
from safetrain.link import Link, Message, Wire
from safetrain.words import names_in_words

_ENDPOINT = "launch.rdzv_endpoint"
_HELLO, _WELCOME = "safetrain launcher", "safetrain node 0"
REFUSE = "refuse"
_GREETING_S = 5.0  # from a connection to the first word of a launcher
_RETRY_S = 0.2
_READ_LIMIT_S = 5.0  # node 0 stays so long for the others to read why they are refused
_NOTHING, _SHOWN = "(none)", 8
_REMEDIES = {
    "config": "Give the same command on all machines: only launch.node_rank, launch.nproc_per_node and "
    "launch.rdzv_endpoint may differ.",
    "versions": "Install the same on all machines.",
}


@dataclass(frozen=True)
class Node:
    """A machine of the job; ``address`` is where node 0 sees it."""

    number: int
    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"node {self.number} ({self.host}, {self.address})"


@dataclass
class Peer:
    """Another launcher of the job."""

    node: Node
    wire: Wire


@dataclass
class Met:
    """All launchers have come.

    Attributes:
        peers: on node 0 all others, by number; on another node only node 0.
    """

    me: Node
    link: Link
    peers: dict[int, Peer] = field(default_factory=dict)

    def refuse(self, wires: Iterable[Wire], text: str) -> None:
        """Tell others that there will be no job, and stay until they have read it."""
        told = list(wires)
        for wire in told:
            wire.send({"kind": REFUSE, "text": text})
        self.await_end(told)

    def await_end(self, wires: Sequence[Wire]) -> None:
        """Stay until the others have hung up, having read all; not for long."""

        def all_gone() -> bool:
            self.link.take()
            return all(wire.end for wire in wires)

        self.link.wait(all_gone, _READ_LIMIT_S)


def meet_nodes(launch: Launch, keys: Mapping[str, str]) -> Met:
    """Find the other launchers. ``keys``: what has to be the same in the config of all, as text.

    Raises:
        UsageError: one is missing, there twice, or told to do something else; the endpoint is wrong or taken.
    """
    return _lead(launch, keys) if launch.number == 0 else _join(launch, keys)


def tell_node_0(launch: Launch, text: str) -> None:
    """This machine will not come, and node 0 need not wait for it; tries once."""
    name, port = launch.endpoint
    if (visit := _Visit.of(launch, name, port, {}, wrong=text)) is not None:
        visit.answered()
        visit.met.link.close()


# --- node 0 ---------------------------------------------------------------------------------------------------------


def _lead(launch: Launch, keys: Mapping[str, str]) -> Met:
    name, port = launch.endpoint
    me = Node(0, machine.host(), os.getpid(), network.resolve(_ENDPOINT, name)[0])
    reception = _Reception(Met(me, Link(_listen(name, port))), launch, keys)
    met = reception.met
    if not met.link.wait(reception.done, launch.join_timeout_s):
        reception.wrong = reception.missing()
    if reception.wrong:
        met.refuse([guest.wire for guest in reception.guests], reception.wrong)
        met.link.close()
        raise UsageError(reception.wrong)
    for peer in met.peers.values():
        peer.wire.send({"kind": "met"})
    return met


class _Reception:
    """Node 0 receives the others."""

    def __init__(self, met: Met, launch: Launch, keys: Mapping[str, str]) -> None:
        self.met, self._launch, self._keys = met, launch, keys
        self.guests: list[Peer] = []
        self.wrong = ""

    def done(self) -> bool:
        """Whether all are here, or something is wrong."""
        for wire, message in self.met.link.take():
            if message.get("kind") == _HELLO:  # else a stranger, who looks for something else
                problem = self._receive(wire, message)
                self.wrong = self.wrong or problem
        gone = next((guest.node for guest in self.guests if guest.wire.end), None)
        if gone is not None and not self.wrong:
            self.wrong = f"{gone} came, and left again before all were there: see its terminal."
        return bool(self.wrong) or len(self.met.peers) == self._launch.nodes - 1

    def _receive(self, wire: Wire, message: Message) -> str:
        """Somebody says who he is; what is wrong with that, in words."""
        mine, address = (
            str(end[0]).removeprefix("::ffff:")
            for end in (wire.connection.getsockname(), wire.connection.getpeername())
        )
        if not self.guests:  # as the others see it: /etc/hosts may map this machine's own name to 127.0.1.1
            self.met.me = replace(self.met.me, address=mine)
        node = Node(message["number"], message["host"], message["pid"], address)
        self.guests.append(guest := Peer(node, wire))
        wire.send({"kind": _WELCOME, **asdict(self.met.me)})
        before = self.met.me if node.number == 0 else getattr(self.met.peers.get(node.number), "node", None)
        if before is not None:
            return (
                f"two launchers have launch.node_rank={node.number}: process {before.pid} on {before.host} and process "
                f"{node.pid} on {node.host}. Start one on each machine, each with a launch.node_rank of its own."
            )
        if wrong := message["wrong"]:
            return f"{node} has ended: {wrong}"
        self.met.peers[node.number] = guest
        return difference("config", self.met.me, self._keys, node, message["keys"])

    def missing(self) -> str:
        """Who did not come, in words."""
        name, port = self._launch.endpoint
        numbers = [number for number in range(1, self._launch.nodes) if number not in self.met.peers]
        who = ("node " if len(numbers) == 1 else "nodes ") + names_in_words([str(number) for number in numbers])
        here = names_in_words([str(self.met.me), *(str(guest.node) for guest in self.guests)])
        return (
            f"{who} of {self._launch.nodes} did not come within {self._launch.join_timeout_s:g} s. Here: {here}; they "
            f"meet at {name}:{port}. Was the same command started there, with launch.node_rank={numbers[0]}"
            f"{', ...' if len(numbers) > 1 else ''}, and does that machine reach {name}:{port} (its name, the network, "
            "a firewall)? If it only starts later, raise launch.join_timeout_s."
        )


def difference(what: str, me: Node, mine: Mapping[str, str], node: Node, theirs: Mapping[str, str]) -> str:
    """What two machines were not started alike with, in words; empty where they were."""
    differ = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
    if not differ:
        return ""
    lines = [
        f"  {key}: {mine.get(key, _NOTHING)} on {me.host}, {theirs.get(key, _NOTHING)} on {node.host}"
        for key in differ[:_SHOWN]
    ]
    if len(differ) > _SHOWN:
        lines.append(f"  and {len(differ) - _SHOWN} more")
    return "\n".join([f"{me} and {node} have not the same {what}:", *lines, _REMEDIES[what]])


def _listen(name: str, port: int) -> socket.socket:
    if not network.is_own_address(name):
        raise UsageError(
            f"{_ENDPOINT}={name}:{port}: that is not {machine.host()}, where node 0 runs, so nobody can meet it there. "
            "Set it to this machine's name or address, on all machines, or give this one the launch.node_rank it has."
        )
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except (OSError, ValueError) as first:
        try:  # a machine without IPv6
            return socket.create_server(("", port), backlog=1024)
        except OSError as error:
            holder = network.port_holder(port)
            why = f"is taken by {holder}" if holder else f"can't be opened ({error.strerror or first})"
            raise UsageError(
                f"port {port} on {machine.host()}, where node 0 is to meet the others, {why}. Choose another port in "
                f"{_ENDPOINT}, the same on all machines, or end that process. If it belongs to this job, two launchers "
                "have launch.node_rank=0."
            ) from error


# --- the others -----------------------------------------------------------------------------------------------------


def _join(launch: Launch, keys: Mapping[str, str]) -> Met:
    name, port = launch.endpoint
    addresses = network.resolve(_ENDPOINT, name)
    where = f"{name}:{port}" + (f" ({', '.join(addresses)})" if addresses != [name] else "")
    if error := network.reach(name, port, launch.join_timeout_s):
        raise UsageError(
            f"node {launch.node_rank} on {machine.host()} found nobody at {where} for {launch.join_timeout_s:g} s: "
            f"{error}. Node 0 has to run on the machine that {_ENDPOINT} names, and no firewall may be between."
        )
    deadline = time.monotonic() + launch.join_timeout_s
    while (visit := _Visit.of(launch, name, port, keys)) is None or not visit.answered():
        hung_up = visit is None or visit.wire.end
        if visit is not None:
            visit.met.link.close()
        if not hung_up or time.monotonic() > deadline:
            raise UsageError(
                f"node {launch.number} on {machine.host()}: a program listens at {where}, but it is not node 0 of a "
                f"training job. Choose another port in {_ENDPOINT}, the same on all machines."
            )
        time.sleep(_RETRY_S)  # it may have been node 0 of an earlier job, which was about to leave
    if problem := visit.refusal(launch.join_timeout_s):
        visit.met.link.close()
        raise UsageError(problem)
    return visit.met


class _Visit:
    """Another machine's launcher calls at node 0."""

    def __init__(self, met: Met, wire: Wire) -> None:
        self.met, self.wire = met, wire
        self._said: list[Message] = []

    @classmethod
    def of(cls, launch: Launch, name: str, port: int, keys: Mapping[str, str], wrong: str = "") -> Self | None:
        """None where nobody opens. ``wrong``: why this machine will not take part."""
        try:
            connection = socket.create_connection((name, port), timeout=_GREETING_S)
        except OSError:
            return None
        me = Node(launch.number, machine.host(), os.getpid(), str(connection.getsockname()[0]))
        met = Met(me, Link())
        wire = met.link.add(connection)
        hello = {"number": me.number, "host": me.host, "pid": me.pid, "keys": dict(keys), "wrong": wrong}
        wire.send({"kind": _HELLO, **hello})
        return cls(met, wire)

    def answered(self) -> bool:
        """Whether it is a node 0 that answers."""
        self.met.link.wait(lambda: self._heard() or bool(self.met.peers), _GREETING_S)
        return bool(self.met.peers) or bool(self._said and self._said[0].get("kind") == REFUSE)

    def refusal(self, limit_s: float) -> str:
        """Wait until all are there; why that will not be, in words."""
        self.met.link.wait(self._heard, limit_s + _READ_LIMIT_S)
        if self._said:
            return str(self._said[0].get("text", ""))
        why = self.wire.end or f"it said nothing for {limit_s:g} s"
        return f"{self.met.peers[0].node} left before all were there: {why}."

    def _heard(self) -> bool:
        self._said.extend(message for _, message in self.met.link.take())
        if self._said and self._said[0].get("kind") == _WELCOME:
            leader = self._said.pop(0)
            node = Node(leader["number"], leader["host"], leader["pid"], leader["address"])
            self.met.peers[0] = Peer(node, self.wire)
        return bool(self._said or self.wire.end)
