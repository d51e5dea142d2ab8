"""One rank's part of a trace: what torch.profiler recorded, with lanes for the loop's phases and for collectives.

A part is a file of JSON lines, gzipped: a header with what the merge needs to know, then an event a line, as Chrome's
trace format has them. All ranks' events count time from one origin, so that parts can be joined as text.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

from safetrain.words import group_in_words

Event = dict[str, Any]

LOOP_LANE, COLLECTIVES_LANE, DEVICE_LANE = 10**9, 10**9 + 1, 10**9 + 10**6
"""Thread ids of the lanes that are no threads; no system has so many threads."""
_NAMES = {"training_step": "forward", "log": "logging", "save_checkpoint": "checkpoint"}
_GAP_NS = 3  # viewers round to 1 ns: a slice that then ends after the next one begins would be drawn round it
_IDS_PER_RANK = 1 << 33  # of arrows; numbers up to 2^53 are exact in every viewer
FLOW_IDS = 1 << 52


class Mark(NamedTuple):
    """The loop has entered a phase, at ``ns`` since the epoch."""

    ns: int
    step: int
    phase: str


@dataclass(frozen=True)
class Call:
    """One collective of one rank. ``end_ns`` is None where nobody noticed."""

    group: str
    about: str
    members: tuple[int, ...]
    number: int
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    begin_ns: int
    end_ns: int | None
    lane: int = COLLECTIVES_LANE


@dataclass(frozen=True)
class Header:
    """What the merge needs to know of a part.

    Attributes:
        machine: the same for all processes that read the same clock.
        first, last: steps that are in it.
        phase_us: time in each phase; operator_us: time in each operator itself, not in what it calls.
    """

    rank: int
    world_size: int
    machine: str
    host: str
    origin_ns: int
    first: int
    last: int
    phase_us: Mapping[str, float]
    operator_us: Mapping[str, float]
    calls: Sequence[Call] = field(default_factory=list)

    @classmethod
    def parse(cls, line: str) -> Self:
        """What ``write_part`` wrote as the first line."""
        facts = json.loads(line)
        calls = [Call(**{**one, "members": tuple(one["members"]), "shapes": _tuples(one["shapes"])})
                 for one in facts.pop("calls")]  # fmt: skip
        return cls(**facts, calls=calls)


class Recorded(NamedTuple):
    """What one rank's profiler wrote, with what is known beside it."""

    trace: Mapping[str, Any]  # as export_chrome_trace writes it
    pid: int
    marks: Sequence[Mark]  # the last one ends the recording
    calls: Sequence[Call]  # without their ends


def build_part(recorded: Recorded, rank: int, world_size: int, machine: str, host: str) -> tuple[Header, list[Event]]:
    """The header and the events of a rank's part."""
    origin_ns = int(recorded.trace.get("baseTimeNanoseconds", 0))
    events = list(_events_of_rank(recorded.trace["traceEvents"], recorded.pid, rank))
    calls = lanes(with_ends(recorded.calls, recorded.trace["traceEvents"], origin_ns))
    phase_us: dict[str, float] = defaultdict(float)
    for mark, after in pairwise(recorded.marks):
        phase_us[_name(mark.phase)] += (after.ns - mark.ns) / 1000
    steps = [mark.step for mark in recorded.marks[:-1]]
    names = [
        _named("process_name", rank, 0, name=f"rank {rank} ({host}, process {recorded.pid})"),
        _named("process_sort_index", rank, 0, sort_index=rank),
        *_lane(rank, LOOP_LANE, "the loop", -2),
    ]
    for number, about in sorted({call.lane: group_in_words(call) for call in calls}.items()):
        names += _lane(rank, number, f"collectives: {about}", -1)
    header = Header(rank, world_size, machine, host, origin_ns, min(steps), max(steps), dict(phase_us),
                    self_times(recorded.trace["traceEvents"], recorded.pid), calls)  # fmt: skip
    phases = _phases(recorded.marks, rank, origin_ns)
    return header, [*names, *events, *phases, *(_slice(call, rank, origin_ns) for call in calls)]


def write_part(path: Path, header: Header, events: Iterable[Event]) -> None:
    """Write a part; a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with gzip.open(draft, "wt", encoding="utf-8", compresslevel=5) as file:
        for line in (asdict(header), *events):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    draft.replace(path)


def _events_of_rank(events: Iterable[Mapping[str, Any]], pid: int, rank: int) -> Iterator[Event]:
    """The profiler's events with the rank as their process: its threads, and its device's streams as further lanes."""
    streams: dict[tuple[Any, Any], int] = {}
    for event in events:
        if isinstance(event.get("pid"), str) or event.get("cat") == "Trace":  # the profiler about itself
            continue
        lane = event.get("tid", 0)
        if event.get("pid") != pid or not isinstance(lane, int):
            lane = streams.setdefault((event.get("pid"), lane), DEVICE_LANE + len(streams))
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": event["args"]}
            continue
        placed = {**event, "pid": rank, "tid": lane}
        if isinstance(event.get("id"), int):
            placed["id"] = rank * _IDS_PER_RANK + event["id"]
        yield placed


def _phases(marks: Sequence[Mark], rank: int, origin_ns: int) -> Iterator[Event]:
    """A range for each phase between two marks, and one round those of a step."""
    at = {"ph": "X", "pid": rank, "tid": LOOP_LANE}
    first = 0
    for index, (mark, after) in enumerate(pairwise(marks)):
        if after.step != mark.step or index == len(marks) - 2:
            times = _times(marks[first].ns, after.ns - _GAP_NS, origin_ns)
            yield {**at, "cat": "step", "name": f"step {mark.step}", **times}
            first = index + 1
    for mark, after in pairwise(marks):
        times = _times(mark.ns, after.ns - 2 * _GAP_NS, origin_ns)
        yield {**at, "cat": "phase", "name": _name(mark.phase), **times, "args": {"step": mark.step}}


def _name(phase: str) -> str:
    return _NAMES.get(phase, phase)


def with_ends(calls: Sequence[Call], events: Iterable[Mapping[str, Any]], origin_ns: int) -> list[Call]:
    """Collectives with their ends, as the profiler saw them.

    Gloo's events carry neither group nor number: a call takes the first one of its op and shapes that began after it
    was issued. NCCL's kernels carry the group, and follow each other in it: there a call begins when its kernel does.
    """
    gloo: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    nccl: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted((one for one in events if one.get("ph") == "X"), key=lambda one: one["ts"]):
        args = event.get("args", {})
        if event["name"].startswith("gloo:") and event.get("cat") == "user_annotation":
            gloo[event["name"][len("gloo:") :], _tuples(args.get("Input Dims", ()))].append(event)
        elif event.get("cat") == "kernel" and "Process Group Name" in args:
            nccl[str(args["Process Group Name"])].append(event)
    kernels_left = {group: iter(found) for group, found in nccl.items()}
    counts: dict[str, int] = defaultdict(int)
    for call in calls:
        counts[call.group] += 1
    ended = []
    for call in calls:
        begin_ns, end_ns = call.begin_ns, call.end_ns
        if counts[call.group] == len(nccl.get(call.group, ())):
            kernel = next(kernels_left[call.group])
            begin_ns, end_ns = _ns(kernel["ts"], origin_ns), _ns(kernel["ts"] + kernel["dur"], origin_ns)
        else:
            same = gloo[call.op, call.shapes]
            later = next((one for one in same if _ns(one["ts"], origin_ns) >= call.begin_ns), None)
            if later is not None:
                same.remove(later)
                end_ns = _ns(later["ts"] + later["dur"], origin_ns)
        ended.append(replace(call, begin_ns=begin_ns, end_ns=end_ns))
    return ended


def lanes(calls: Sequence[Call]) -> list[Call]:
    """Each call with a lane of its group in which no other one is at that time: buckets overlap, lanes must not."""
    free_at: dict[str, list[int]] = defaultdict(list)
    number: dict[tuple[str, int], int] = {}
    placed = []
    for call in sorted(calls, key=lambda one: one.begin_ns):
        ends = free_at[call.group]
        index = next((i for i, end in enumerate(ends) if end <= call.begin_ns), len(ends))
        ends[index : index + 1] = [call.begin_ns + 1 if call.end_ns is None else call.end_ns]
        lane = number.setdefault((call.group, index), COLLECTIVES_LANE + len(number))
        placed.append(replace(call, lane=lane))
    return placed


def self_times(events: Iterable[Mapping[str, Any]], pid: int) -> dict[str, float]:
    """Microseconds in each operator, without those in the operators that it called."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event.get("pid") == pid:
            by_thread[event["tid"]].append(event)
    spent: dict[str, float] = defaultdict(float)
    for calls in by_thread.values():
        open_calls: list[Mapping[str, Any]] = []
        for event in sorted(calls, key=lambda one: (one["ts"], -one["dur"])):
            while open_calls and open_calls[-1]["ts"] + open_calls[-1]["dur"] <= event["ts"]:
                open_calls.pop()
            spent[event["name"]] += event["dur"]
            if open_calls:
                spent[open_calls[-1]["name"]] -= event["dur"]
            open_calls.append(event)
    return dict(spent)


def _slice(call: Call, rank: int, origin_ns: int) -> Event:
    end_ns = call.begin_ns + 1 if call.end_ns is None else call.end_ns
    args = {"group": call.about or call.group, "number": call.number, "shapes": call.shapes, "dtype": call.dtype}
    times = _times(call.begin_ns, max(call.begin_ns + 1, end_ns), origin_ns)
    return {"ph": "X", "pid": rank, "tid": call.lane, "cat": "collective", "name": call.op, **times, "args": args}


def _lane(rank: int, lane: int, name: str, place: int) -> list[Event]:
    return [
        _named("thread_name", rank, lane, name=name),
        _named("thread_sort_index", rank, lane, sort_index=place),
    ]


def _named(what: str, rank: int, lane: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": args}


def _times(begin_ns: int, end_ns: int, origin_ns: int) -> dict[str, float]:
    return {"ts": (begin_ns - origin_ns) / 1000, "dur": max(0, end_ns - begin_ns) / 1000}


def _ns(ts_us: float, origin_ns: int) -> int:
    return origin_ns + round(ts_us * 1000)


def _tuples(shapes: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of lists as tuples; of a list of tensors, the tensors' own."""
    found: list[tuple[int, ...]] = []
    for shape in shapes:
        if shape and isinstance(shape[0], (list, tuple)):
            found += [tuple(one) for one in shape]
        else:
            found.append(tuple(shape))
    return tuple(found)
