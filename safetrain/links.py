"""How ranks reach each other: a first sum within a time limit, the links of a ring at two sizes, the machines' clocks.

All ranks measure together, before anything is built. What comes out is compared between links of one kind, inside a
machine or between two: a link, or a machine, that is much slower than the others is named.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from safetrain.comm import Comm, is_communication_error
from safetrain.errors import PreflightError
from safetrain.finding import Finding, Linked, Said, of_hosts, ranks_of, size, where
from safetrain.preflight_config import Preflight
from safetrain.transports import suggestion
from safetrain.words import ranks_in_words

_SMALL, _LARGE, _LARGE_ON_GPUS = 8, 1 << 20, 16 << 20  # bytes
_TIMES, _CLOCK_TIMES = 5, 3
_MUCH_SLOWER = 5.0  # times the others' median
_AT_LEAST_SMALL_S, _AT_LEAST_LARGE_S = 0.005, 0.02  # slower by so much: less is the noise of a busy machine
_SLOWEST_BETWEEN = (
    100e6 / 8
)  # bytes a second that even an old cable carries; of two machines there is no other link to compare
_BARRIER_SLACK_S = 5.0


class Measured(NamedTuple):
    """What one rank measured.

    Attributes:
        sum_s: the first sum over all ranks.
        small_s, large_s: until the previous rank's message was here, at the best of several times.
        large: bytes of the large one.
        clocks: this machine's clock when all ranks had just met, several times.
    """

    sum_s: float
    small_s: float
    large_s: float
    large: int
    clocks: tuple[float, ...]


def measure(comm: Comm, options: Preflight) -> Measured:
    """All ranks call it together.

    Raises:
        PreflightError: the first sum failed, on all ranks; with the setting that makes it work, if one does.
        PeerFailed: some rank did not come.
    """
    sum_s = _first_sum(comm, options.all_reduce_s)
    large = _LARGE if comm.device.type == "cpu" else _LARGE_ON_GPUS
    small_s = large_s = 0.0
    if comm.world_size > 1:
        small_s = min(_ring_s(comm, _SMALL) for _ in range(_TIMES))
        large_s = _ring_s(comm, large)
        slowest_s = comm.agree(large_s, "max")  # the same number of times on all ranks
        times = min(_TIMES, int(options.links_s / max(slowest_s, 1e-6)))
        large_s = min([large_s, *(_ring_s(comm, large) for _ in range(times))])
    return Measured(sum_s, small_s, large_s, large, tuple(_clock(comm) for _ in range(_CLOCK_TIMES)))


def _first_sum(comm: Comm, limit_s: float) -> float:
    begin = time.monotonic()
    trouble = within(limit_s, lambda: sum_of_ranks(comm))
    seconds = time.monotonic() - begin
    if comm.world_size == 1 and not trouble:
        return seconds
    if trouble:
        comm.post(f"preflight/trouble/{comm.rank}", trouble)
        comm.store.add("preflight/troubled", 1)
    comm.barrier("the preflight's first sum", limit_s=limit_s + _BARRIER_SLACK_S)
    if comm.store.add("preflight/troubled", 0):
        told = {rank: comm.read(f"preflight/trouble/{rank}") for rank in range(comm.world_size)}
        raise PreflightError(_no_sum({rank: text for rank, text in told.items() if text}, comm, limit_s))
    return seconds


def _no_sum(troubles: dict[int, str], comm: Comm, limit_s: float) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in troubles.items():
        by_text.setdefault(text, []).append(rank)
    told = "; ".join(f"{text} ({ranks_in_words(ranks)})" for text, ranks in by_text.items())
    words = f"all_reduce: the ranks met, but a first sum over all of them failed: {told}."
    if comm.device.type == "cuda":
        return f"{words} {suggestion(comm, limit_s)}"
    return f"{words} Look for a firewall between the machines, or name the interface by GLOO_SOCKET_IFNAME."


def sum_of_ranks(comm: Comm) -> str:
    """A sum over all ranks as gradients are summed: empty if it is right, else what came out."""
    values = torch.full((1024,), float(comm.rank + 1), device=comm.device)
    comm.sum_like_gradients(values).wait()
    got, right = values.tolist(), comm.world_size * (comm.world_size + 1) / 2
    wrong = [value for value in got if value != right]
    return f"{wrong[0]:g} came out, and {right:g} is right" if wrong else ""


def within(limit_s: float, work: Callable[[], str]) -> str:
    """What ``work`` says, or what its collective raised, or that it took longer than ``limit_s``.

    In a thread: the first call of NCCL connects the ranks, and knows no time limit while it does.
    """
    said: list[str] = []

    def run() -> None:
        try:
            said.append(work())
        except RuntimeError as error:
            kind = "" if is_communication_error(error) else f"{type(error).__name__}: "
            said.append(kind + str(error).strip().partition("\n")[0])

    thread = threading.Thread(target=run, name="safetrain-first-sum", daemon=True)
    thread.start()
    thread.join(limit_s)
    return said[0] if said else f"no answer for {limit_s:g} s"


def _ring_s(comm: Comm, count: int) -> float:
    """Seconds until the previous rank's ``count`` bytes are here; all ranks send at the same time."""
    values = torch.zeros(count // 4, device=comm.device)
    received = torch.empty_like(values)
    comm.agree(0, "sum")  # they begin together
    begin = time.perf_counter()
    arrival, *others = comm.pass_on(values, received)
    arrival.wait()
    _finish(comm)
    seconds = time.perf_counter() - begin
    for work in others:
        work.wait()
    _finish(comm)
    return seconds


def _finish(comm: Comm) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


def _clock(comm: Comm) -> float:
    comm.agree(0, "sum")
    return time.time()


@dataclass(frozen=True)
class AllReduce:
    """The first sum over all ranks; one that fails ends the job where it is measured."""

    name: str = "all_reduce"

    def look(self, here: Linked) -> float:
        return here.measured.sum_s

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        return [Finding(self.name, f"right, in {1000 * max(one.facts for one in said):.3g} ms")]


@dataclass(frozen=True)
class Links:
    """Each rank's link from the one before it, against the others of its kind."""

    name: str = "links"

    def look(self, here: Linked) -> dict[str, Any]:
        measured = here.measured
        return {"small": measured.small_s, "large": measured.large_s, "bytes": measured.large}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        if len(said) == 1:
            return [Finding(self.name, "none: one rank")]
        findings = []
        for inside in (True, False):
            links = [one for one in said if (one.host == said[one.rank - 1].host) is inside]
            slow = [
                one
                for one in links
                if _is_slow(one, links, "small", _AT_LEAST_SMALL_S) or _is_slow(one, links, "large", _AT_LEAST_LARGE_S)
            ]
            all_slow = [] if slow or inside else [one for one in links if _carries(one) < _SLOWEST_BETWEEN]
            if slow := slow or all_slow:
                findings.append(self._slow_links(slow, links, said, compared=not all_slow))
        worst_s = max(one.facts["large"] for one in said)
        value = (
            f"{1000 * max(one.facts['small'] for one in said):.2g} ms, "
            f"{size(said[0].facts['bytes'] / max(worst_s, 1e-9))}/s at least"
        )
        return findings or [Finding(self.name, value)]

    def _slow_links(
        self, slow: Sequence[Said], links: Sequence[Said], said: Sequence[Said], *, compared: bool
    ) -> Finding:
        worst = max(slow, key=lambda one: one.facts["large"])
        usual_s = statistics.median_low([one.facts["large"] for one in links])
        against = (
            f"where others take {1000 * usual_s:.3g} ms"
            if compared
            else f"which is {size(_carries(worst))}/s, less than 100 Mbit/s"
        )
        times = (
            f"{1000 * worst.facts['small']:.2g} ms, and {1000 * worst.facts['large']:,.4g} ms for "
            f"{size(worst.facts['bytes'])}, {against}"
        )
        ends = [{said[one.rank - 1].host, one.host} for one in slow]
        common = set.intersection(*ends)
        if len(slow) > 1 and len(common) == 1 and len(of_hosts(said)) > 2:
            (host,) = common
            words = f"all links of {host} are slow; the slowest takes {times}."
        else:
            which = "the link" if len(slow) == 1 else f"{len(slow)} links are slow; the slowest, that"
            words = f"{which} from {_named(worst, said)} takes {times}."
        remedy = "Every step waits for the slowest one: look at that machine's load, cable, switch and interface."
        return Finding(self.name, times, "warn", ranks_of(slow), words, remedy)


def _is_slow(one: Said, links: Sequence[Said], what: str, least_s: float) -> bool:
    """Much slower than half of the links of its kind; of two, than the other one."""
    usual_s = statistics.median_low([other.facts[what] for other in links])
    return one.facts[what] > _MUCH_SLOWER * usual_s and one.facts[what] - usual_s > least_s


def _carries(one: Said) -> float:
    """Bytes a second."""
    return float(one.facts["bytes"] / max(one.facts["large"], 1e-9))


def _named(one: Said, said: Sequence[Said]) -> str:
    """Both ends of a rank's link, with their machines where there are several."""
    several = len(of_hosts(said)) > 1
    ends = (said[one.rank - 1], one)
    return " to ".join(f"rank {end.rank}{f' ({end.host})' if several else ''}" for end in ends)


@dataclass(frozen=True)
class Clock:
    """The machines' clocks: events, logs and failures are put in order by them."""

    name: str = "clock"

    def look(self, here: Linked) -> dict[str, Any]:
        return {"clocks": here.measured.clocks, "limit": here.options.clock_s}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        limit_s, reference = said[0].facts["limit"], said[0].facts["clocks"]
        offsets = [_offset(reference, one.facts["clocks"]) for one in said]
        worst = max(said, key=lambda one: abs(offsets[one.rank]))
        offset_s = offsets[worst.rank]
        if abs(offset_s) <= limit_s:
            return [Finding(self.name, f"within {max(0.001, abs(offset_s)):.3f} s")]
        off = [one for one in said if abs(offsets[one.rank]) > limit_s]
        which = "ahead of" if offset_s > 0 else "behind"
        words = f"the clock of {where([worst], said)} is {abs(offset_s):.1f} s {which} rank 0's."
        remedy = "Let all machines take their time from one server (chrony, ntpd): the first to fail is told by time."
        return [Finding(self.name, f"{offset_s:+.1f} s", "warn", ranks_of(off), words, remedy)]


def _offset(reference: Sequence[float], clocks: Sequence[float]) -> float:
    """The smallest difference: a rank may come late out of a meeting, never early."""
    return min((own - its for own, its in zip(clocks, reference, strict=True)), key=abs)
