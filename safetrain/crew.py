"""The launchers of a job, together: who runs which ranks, when all of them end, what each has seen.

Node 0 leads: it says when ranks are started and with which config, hears how they ended everywhere, and tells the
verdict. Any launcher may say that its ranks have failed, or that it was told to leave: then all end theirs. A launcher
whose machine is silent for ``launch.node_timeout_s``, or whose connection is gone, is lost, and the job ends.

A job on one machine has a crew of one (alone.py), which goes the same way.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Self

from safetrain.errors import UsageError
from safetrain.launch_config import Launch
from safetrain.link import Message, Wire
from safetrain.nodes import REFUSE, Met, Node, Peer, difference, meet_nodes
from safetrain.orders import Outcome, Report, Share

_END_SLACK_S = 10.0  # beyond the grace: SIGKILL, and what a loaded machine takes


class LauncherLost(Exception):
    """Node 0 can't be reached any more."""


class _Many:
    """What node 0 and the others have in common.

    Attributes:
        signalled: the first signal that a launcher got, and on which host.
        lost: the machines that are gone, by number, and what is known of each, in words.
    """

    def __init__(self, met: Met, timeout_s: float) -> None:
        self.me, self._met, self._timeout_s = met.me, met, timeout_s
        self.lost: dict[int, str] = {}
        self.signalled: tuple[signal.Signals, str] | None = None
        self._ending_since: float | None = None
        self._refused = ""
        self._hung_up: list[Wire] = []  # of those who said so, and wait for nothing but this one's leave

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and not self._told_end():
            text = f"{self.me} has ended: {error or type(error).__name__}"
            self._met.refuse([peer.wire for peer in self._alive() if peer.wire not in self._hung_up], text)
        self._met.link.close()

    def end_wanted(self) -> bool:
        """Whether this machine's ranks have to end because of others; looked at ten times a second."""
        self._look()
        return self._ending_since is not None

    def ending(self, number: signal.Signals | None) -> None:
        """This machine's ranks are being ended: by a signal, or since one of them failed."""
        self._end(number, self.me.host)

    def _told_end(self) -> bool:
        raise NotImplementedError

    def _alive(self) -> list[Peer]:
        return [peer for number, peer in self._met.peers.items() if number not in self.lost and not peer.wire.end]

    def _end(self, number: signal.Signals | None, host: str, origin: Wire | None = None) -> None:
        """All end their ranks, from now on. ``origin`` has said so, and need not be told."""
        if number is not None and self.signalled is None:
            self.signalled = (number, host)
        if self._ending_since is not None:
            return
        self._ending_since = time.monotonic()
        for peer in self._alive():
            if peer.wire is not origin:
                peer.wire.send({"kind": "ending", "signal": number, "host": host})

    def _look(self) -> None:
        """Hear what others have said; notice who is lost."""
        for wire, message in self._met.link.take():
            self._hear(wire, message)
        for number, peer in self._met.peers.items():
            silence_s = self._met.link.silence_s(peer.wire)
            if number in self.lost or not (peer.wire.end or silence_s > self._timeout_s):
                continue
            self.lost[number] = peer.wire.end or f"silent for {silence_s:.0f} s"
            self._end(None, self.me.host)

    def _hear(self, wire: Wire, message: Message) -> None:
        if message["kind"] == "ending":
            number = message["signal"]
            self._end(None if number is None else signal.Signals(number), message["host"], wire)
        elif message["kind"] == REFUSE:
            self._refused = self._refused or message["text"]
            self._ending_since = self._ending_since or time.monotonic()
            self._hung_up.append(wire)

    def _refuse_if_wrong(self) -> None:
        if self._refused:
            raise UsageError(self._refused)
        if self.lost:
            number, why = next(iter(self.lost.items()))
            raise UsageError(f"{self._met.peers[number].node} is gone before ranks were started: {why}.")


class Leader(_Many):
    """Node 0's launcher."""

    def __init__(self, met: Met, timeout_s: float, grace_s: float) -> None:
        super().__init__(met, timeout_s)
        self._grace_s = grace_s
        self._answers: dict[int, Message] = {}
        self._finished = False
        self.shares: list[Share] = []

    @property
    def nodes(self) -> list[Node]:
        """All machines, by number."""
        return [self.me, *(peer.node for _, peer in sorted(self._met.peers.items()))]

    def agree(self, ranks: int, versions: Mapping[str, str], host: str) -> None:
        """Wait until every launcher has checked its config, and knows how many ranks it can run.

        Raises:
            UsageError: one can't, or runs other versions.
        """
        answers = self._collect("ready")
        for number, answer in answers.items():
            if text := difference("versions", self.me, versions, self._met.peers[number].node, answer["versions"]):
                raise UsageError(text)
        counts = [ranks, *(answer["ranks"] for _, answer in sorted(answers.items()))]
        total, nodes = sum(counts), len(counts)
        self.shares = [Share(sum(counts[:n]), counts[n], total, n, nodes, host) for n in range(nodes)]

    def ask(self, question: Message) -> dict[int, Message]:
        """What each of the others answers."""
        for peer in self._alive():
            peer.wire.send(question)
        return self._collect("answer")

    def start(self, config: str, port: int) -> Share:
        """All start their ranks on ``config``; they meet at ``port`` of this machine."""
        self._ending_since, self._answers, self.signalled = None, {}, None
        self.shares = [replace(share, port=port) for share in self.shares]
        for number, peer in self._met.peers.items():
            peer.wire.send({"kind": "go", "config": config, "share": asdict(self.shares[number])})
        return self.shares[0]

    def gather(self, *, ok: bool) -> list[Report]:
        """How the ranks of all others ended, those of lost machines excepted. Where this one's have failed, they have
        only the time that ranks have to end."""
        if not ok:
            self._end(None, self.me.host)

        def complete() -> bool:
            self._look()
            owing = [peer.node.number for peer in self._alive() if peer.node.number not in self._answers]
            since, limit_s = self._ending_since, self._grace_s + _END_SLACK_S
            if since is not None and time.monotonic() - since > limit_s:
                self.lost |= dict.fromkeys(owing, "its launcher did not say how its ranks ended")
                return True
            return not owing

        while not self._met.link.wait(complete, self._timeout_s):
            pass  # their ranks go on, or have time to end
        return [Report.of_message(message) for message in self._answers.values() if message["kind"] == "report"]

    def tell(self, outcome: Outcome) -> None:
        """How the attempt ended; after the last one, wait until all have read it."""
        for peer in self._alive():
            peer.wire.send({"kind": "outcome", **asdict(outcome)})
        if not outcome.again:
            self._finished = True
            self._met.await_end([peer.wire for peer in self._alive()])

    def _told_end(self) -> bool:
        return self._finished

    def _hear(self, wire: Wire, message: Message) -> None:
        number = next((number for number, peer in self._met.peers.items() if peer.wire is wire), None)
        if number is None:  # somebody who came too late, or a stranger
            wire.send({"kind": REFUSE, "text": f"the job of {self.me} has all its launchers: this one is too many."})
        elif message["kind"] in ("ready", "answer", "report"):
            self._answers[number] = message
        else:
            super()._hear(wire, message)

    def _collect(self, kind: str) -> dict[int, Message]:
        """The next answer of each; raises what is wrong."""

        def complete() -> bool:
            self._look()
            return bool(self._refused or self.lost) or len(self._answers) == len(self._met.peers)

        while not self._met.link.wait(complete, self._timeout_s):
            pass  # they beat, and import
        self._refuse_if_wrong()
        answers, self._answers = self._answers, {}
        assert all(answer["kind"] == kind for answer in answers.values())
        return answers


class Follower(_Many):
    """The launcher of another machine."""

    def __init__(self, met: Met, timeout_s: float) -> None:
        super().__init__(met, timeout_s)
        self._said: list[Message] = []
        self._finished = False

    @property
    def leader(self) -> Node:
        return self._met.peers[0].node

    def say(self, message: Message) -> None:
        self._met.peers[0].wire.send(message)

    def next(self) -> Message:
        """What node 0 says next; an ``ending`` in between is of ranks that are gone already.

        Raises:
            UsageError: there will be no job.
            LauncherLost: node 0 is gone.
        """

        def said() -> bool:
            self._look()
            return bool(self._said or self._refused or self.lost)

        while not self._met.link.wait(said, self._timeout_s):
            pass  # it beats, and is busy
        if not self._said:
            if self._refused:
                raise UsageError(self._refused)
            raise LauncherLost(self.lost[0])
        message = self._said.pop(0)
        if message["kind"] == "go":
            self._ending_since, self.signalled = None, None
        self._finished = message["kind"] == "outcome" and not message["again"]
        return message

    def _told_end(self) -> bool:
        return bool(self.lost or self._refused or self._finished)

    def _hear(self, wire: Wire, message: Message) -> None:
        if message["kind"] in ("go", "ask", "outcome"):
            self._said.append(message)
        else:
            super()._hear(wire, message)


@contextmanager
def crew_of(launch: Launch, keys: Mapping[str, str]) -> Iterator[Leader | Follower | None]:
    """The launchers of the other machines, when all are there; None for a job on one machine. ``keys``: what has to be
    the same in the config of all, as text.

    Raises:
        UsageError: they do not all come, or were not started alike.
    """
    if launch.nodes == 1:
        yield None
        return
    met = meet_nodes(launch, keys)
    grace_s = max(launch.grace_s, launch.preemption_grace_s)
    crew = Follower(met, launch.node_timeout_s) if launch.number else Leader(met, launch.node_timeout_s, grace_s)
    with crew:
        yield crew
