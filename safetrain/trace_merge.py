"""All ranks' parts as one trace: clocks aligned, the ranks' calls of one collective joined, and what it shows in words.

Parts are joined as text: only what comes from a machine with another clock is read, and moved.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from safetrain.timing import shares_in_words
from safetrain.trace_part import FLOW_IDS, LOOP_LANE, Call, Event, Header
from safetrain.words import ranks_in_words

PARTS_FOLDER = "parts"
_ENDS_TOGETHER = ("all_reduce", "all_gather", "barrier", "reduce_scatter", "all_to_all")
"""Collectives that no rank can leave before the last one has come; a broadcast's source can."""


class Join(NamedTuple):
    """One collective: what each rank had of it."""

    op: str
    calls: Mapping[int, Call]  # by rank


@dataclass(frozen=True)
class Merged:
    """What a merge came to.

    Attributes:
        path: the trace.
        missing: ranks that have no part in it.
        words: what it shows.
    """

    path: Path
    first: int
    last: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    joined: int
    clocks: str
    words: tuple[str, ...]


def part_path(traces: Path, name: str, rank: int) -> Path:
    """Where a rank's part lies until it is merged."""
    return traces / PARTS_FOLDER / f"{name}.rank_{rank}.jsonl.gz"


def unmerged(traces: Path) -> dict[str, list[Path]]:
    """Parts that lie in a folder of traces, by the name of their trace."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((traces / PARTS_FOLDER).glob("*.rank_*.jsonl.gz")):
        found[path.name.partition(".rank_")[0]].append(path)
    return dict(found)


def merge(traces: Path, name: str, parts: Sequence[Path]) -> Merged:
    """Write ``traces/<name>.json.gz`` from ``parts``; they are removed once the trace is whole."""
    by_rank = {header.rank: (header, path) for path in parts for header in [read_header(path)]}
    headers = [by_rank[rank][0] for rank in sorted(by_rank)]
    joins = joined(headers)
    offsets = clock_offsets_ns(headers, joins)
    world_size = headers[0].world_size
    missing = tuple(rank for rank in range(world_size) if rank not in by_rank)
    path = traces / f"{name}.json.gz"
    origin_ns = headers[0].origin_ns
    clocks = clocks_in_words(headers, offsets)
    facts = {"ranks": world_size, "missing": missing, "clocks": clocks, "collectives_joined": len(joins)}
    draft = path.with_suffix(".draft")
    with gzip.open(draft, "wt", encoding="utf-8", compresslevel=5) as file:
        head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns, "safetrain": facts}
        file.write(json.dumps(head)[:-1] + ',"traceEvents":[\n')
        for header in headers:
            shift_us = (header.origin_ns - origin_ns - offsets[header.machine]) / 1000
            _append(file, by_rank[header.rank][1], shift_us)
        for event in arrows(joins, headers, offsets, origin_ns):
            file.write(json.dumps(event, separators=(",", ":")) + ",\n")
        end = {
            "ph": "M",
            "name": "process_labels",
            "pid": headers[0].rank,
            "tid": LOOP_LANE,
            "args": {"labels": clocks},
        }
        file.write(json.dumps(end) + "\n]}\n")
    draft.replace(path)
    if not missing:
        for part in parts:
            part.unlink()
        with suppress(OSError):  # another trace's are there
            (traces / PARTS_FOLDER).rmdir()
    words = in_words(headers, joins, offsets)
    first, last = min(one.first for one in headers), max(one.last for one in headers)
    return Merged(path, first, last, tuple(by_rank), missing, len(joins), clocks, words)


def read_header(path: Path) -> Header:
    """The first line of a part."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return Header.parse(file.readline())


def joined(headers: Sequence[Header]) -> list[Join]:
    """The collectives of which every member that has a part has a call, in the order in which they began.

    A call meets the one of the same number in the same group. Where ops differ there, they did not meet.
    """
    calls: dict[tuple[str, tuple[int, ...], int], dict[int, Call]] = defaultdict(dict)
    for header in headers:
        for call in header.calls:
            calls[call.group, call.members, call.number][header.rank] = call
    ranks = {header.rank for header in headers}
    found = []
    for (_, members, _), by_rank in calls.items():
        expected = ranks & set(members) if members else ranks
        ops = {call.op for call in by_rank.values()}
        if len(by_rank) > 1 and by_rank.keys() == expected and len(ops) == 1:
            found.append(Join(ops.pop(), dict(sorted(by_rank.items()))))
    return sorted(found, key=lambda join: min(call.begin_ns for call in join.calls.values()))


def clock_offsets_ns(headers: Sequence[Header], joins: Sequence[Join]) -> dict[str, int]:
    """By how much each machine's clock is ahead of the first rank's machine's.

    A collective ends at about the same time on all ranks: the median over all that were joined. Ranks of one machine
    read one clock, and need none of this.
    """
    machine = {header.rank: header.machine for header in headers}
    reference = headers[0].machine
    ahead: dict[str, list[int]] = defaultdict(list)
    for join in joins:
        ends: dict[str, list[int]] = defaultdict(list)
        for rank, call in join.calls.items():
            if call.end_ns is not None and join.op.startswith(_ENDS_TOGETHER):
                ends[machine[rank]].append(call.end_ns)
        if reference in ends:
            middle = statistics.median(ends[reference])
            for other, times in ends.items():
                ahead[other].append(round(statistics.median(times) - middle))
    offsets = {other: round(statistics.median(ahead[other])) if ahead[other] else 0 for other in machine.values()}
    return {**offsets, reference: 0}


def clocks_in_words(headers: Sequence[Header], offsets: Mapping[str, int]) -> str:
    """How the ranks' times were brought together."""
    hosts = {header.machine: header.host for header in headers}
    if len(hosts) == 1:
        return "one machine, one clock"
    moved = ", ".join(
        f"{hosts[one]} by {-ns / 1e6:+.3f} ms" for one, ns in offsets.items() if one != headers[0].machine
    )
    return f"clocks aligned to {headers[0].host}'s by the ends of collectives: {moved}"


def arrows(
    joins: Sequence[Join], headers: Sequence[Header], offsets: Mapping[str, int], origin_ns: int
) -> Iterator[Event]:
    """For each collective an arrow through all its ranks, from the first that came to the last."""
    offset = {header.rank: offsets[header.machine] for header in headers}
    for number, join in enumerate(joins):
        came = sorted((call.begin_ns - offset[rank], rank) for rank, call in join.calls.items())
        for index, (ns, rank) in enumerate(came):
            at = {"pid": rank, "tid": join.calls[rank].lane, "ts": (ns - origin_ns) / 1000}
            about = {"cat": "collective", "name": join.op, "id": FLOW_IDS + number}
            if index == 0:
                yield {"ph": "s", **about, **at}
            elif index < len(came) - 1:
                yield {"ph": "t", **about, **at}
            else:
                yield {"ph": "f", "bp": "e", **about, **at}


def in_words(headers: Sequence[Header], joins: Sequence[Join], offsets: Mapping[str, int]) -> tuple[str, ...]:
    """The three largest things that a trace shows: where steps spend their time, who is waited for, which operator."""
    steps = max(one.last - one.first + 1 for one in headers)
    said = []
    phases: dict[str, float] = defaultdict(float)
    operators: dict[str, float] = defaultdict(float)
    for header in headers:
        for name, us in header.phase_us.items():
            phases[name] += us / len(headers) / steps
        for name, us in header.operator_us.items():
            operators[name] += us / len(headers) / steps
    if phases:
        said.append(f"a step took {sum(phases.values()) / 1000:.3g} ms: {shares_in_words(phases)}")
    if text := waiting_in_words(headers, joins, offsets, steps):
        said.append(text)
    if operators:
        name = max(operators, key=operators.__getitem__)
        said.append(f"most time in one operator: {name}, {operators[name] / 1000:.3g} ms a step")
    return tuple(said)


def waiting_in_words(headers: Sequence[Header], joins: Sequence[Join], offsets: Mapping[str, int], steps: int) -> str:
    """Which rank the others wait for in collectives, and how long; empty where there are none."""
    offset = {header.rank: offsets[header.machine] for header in headers}
    last: dict[int, list[float]] = defaultdict(list)
    for join in joins:
        came = sorted((call.begin_ns - offset[rank], rank) for rank, call in join.calls.items())
        last[came[-1][1]].append((came[-1][0] - came[0][0]) / 1e6)
    if not last:
        return ""
    rank = max(last, key=lambda one: sum(last[one]))
    waits = last[rank]
    said = f"collectives a step: {len(joins) / steps:.3g}; most is waited for rank {rank}, which came last to "
    return said + f"{len(waits)} of {len(joins)}, {statistics.mean(waits):.3g} ms after the first"


def _append(file: TextIO, part: Path, shift_us: float) -> None:
    """The events of a part, a comma after each."""
    with gzip.open(part, "rt", encoding="utf-8") as lines:
        next(lines)  # the header
        for line in lines:
            if shift_us:
                event = json.loads(line)
                if "ts" in event:
                    event["ts"] += shift_us
                line = json.dumps(event, separators=(",", ":")) + "\n"
            file.write(line[:-1] + ",\n")


def missing_in_words(missing: Sequence[int]) -> str:
    """Why a trace is not whole."""
    have = "has" if len(missing) == 1 else "have"
    return f"{ranks_in_words(missing)} {have} no part in it (ended before it was written, or on a disk not seen here)"
