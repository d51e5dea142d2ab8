"""Parts of ranks become one trace: lanes, ends of calls, clocks, joins, a missing rank; exact values."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from safetrain.observer import RunInfo
from safetrain.profile import main, told
from safetrain.profiling import StepProfile
from safetrain.trace_merge import arrows, clock_offsets_ns, clocks_in_words, in_words, joined, merge, part_path
from safetrain.trace_part import (
    COLLECTIVES_LANE,
    DEVICE_LANE,
    FLOW_IDS,
    LOOP_LANE,
    Call,
    Header,
    Mark,
    Recorded,
    build_part,
    lanes,
    self_times,
    with_ends,
    write_part,
)

MS = 1_000_000
ORIGIN_NS = 1_000 * 10**9


def call(number: int, begin_ms: float, end_ms: float | None, op: str = "all_reduce", **others: Any) -> Call:
    end_ns = None if end_ms is None else ORIGIN_NS + round(end_ms * MS)
    facts = {"group": "1", "about": "safetrain_ddp", "members": (), "shapes": ((8,),), "dtype": "Float", **others}
    return Call(number=number, op=op, begin_ns=ORIGIN_NS + round(begin_ms * MS), end_ns=end_ns, **facts)


def header(rank: int, calls: list[Call], machine: str = "m0", ranks: int = 2, **others: Any) -> Header:
    facts: dict[str, Any] = {"phase_us": {}, "operator_us": {}, "origin_ns": ORIGIN_NS, **others}
    return Header(rank, ranks, machine, f"host_{machine}", first=3, last=4, calls=calls, **facts)


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", pid: int = 77, tid: Any = 78, **args: Any) -> Any:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


# --- one rank's part --------------------------------------------------------------------------------------------------


def test_a_part_has_lanes_for_the_loop_its_threads_its_device_and_its_collectives() -> None:
    trace = {
        "baseTimeNanoseconds": ORIGIN_NS,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "pid": 77, "tid": 78, "args": {"name": "main"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
            event("PyTorch Profiler (0)", 0, 1, "Trace", pid="Spans"),
            event("aten::mm", 10, 4),
            event("kernel", 12, 3, "kernel", pid=0, tid=7),
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 77, "tid": 78, "ts": 10},
            event("gloo:all_reduce", 21, 9, "user_annotation", tid=80, **{"Input Dims": [[8]]}),
        ],
    }
    marks = [Mark(ORIGIN_NS, 3, "data"), Mark(ORIGIN_NS + 2 * MS, 3, "training_step"), Mark(ORIGIN_NS + 5 * MS, 4, "")]
    found, events = build_part(Recorded(trace, 77, marks, [call(7, 0.02, None)]), 3, 4, "boot", "node7")
    assert (found.rank, found.world_size, found.first, found.last) == (3, 4, 3, 3)
    assert found.phase_us == {"data": 2000.0, "forward": 3000.0}
    assert found.operator_us == {"aten::mm": 4.0}
    (one,) = found.calls
    assert (one.end_ns, one.lane) == (ORIGIN_NS + 30_000, COLLECTIVES_LANE)
    assert {e["pid"] for e in events} == {3}
    names = {(e["name"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert names["process_name", 0] == {"name": "rank 3 (node7, process 77)"}
    assert names["thread_name", LOOP_LANE] == {"name": "the loop"}
    assert names["thread_name", 78] == {"name": "main"}
    assert names["thread_name", DEVICE_LANE] == {"name": "stream 7"}
    assert names["thread_name", COLLECTIVES_LANE] == {"name": "collectives: the gradients"}
    placed = {e["name"]: e for e in events if e["ph"] != "M"}
    assert "PyTorch Profiler (0)" not in placed
    assert placed["kernel"]["tid"] == DEVICE_LANE
    assert placed["ac2g"]["id"] == 3 * 2**33 + 5
    assert (placed["step 3"]["ts"], placed["step 3"]["dur"]) == (0.0, 4999.997)
    assert (placed["forward"]["ts"], placed["forward"]["dur"]) == (2000.0, 2999.994)  # some ns apart
    assert (placed["all_reduce"]["ts"], placed["all_reduce"]["dur"]) == (20.0, 10.0)


def test_a_call_takes_the_first_end_of_its_op_and_shapes_after_it_was_issued() -> None:
    def gloo(ts: float, dur: float, dims: Any) -> Any:
        return event("gloo:all_reduce", ts, dur, "user_annotation", **{"Input Dims": dims})

    events = [gloo(500, 100, [[8]]), gloo(1100, 50, [[8]]), gloo(1200, 50, [[9]]), gloo(1300, 50, [[8]])]
    calls = [call(1, 1.0, None), call(2, 1.01, None), call(3, 1.02, None), call(4, 1.0, None, "broadcast")]
    ends = [one.end_ns for one in with_ends(calls, events, ORIGIN_NS)]
    assert ends == [ORIGIN_NS + 1_150_000, ORIGIN_NS + 1_350_000, None, None]


def test_nccl_calls_are_where_their_kernels_are() -> None:
    events = [
        event("ncclDevKernel_AllReduce", ts, 100, "kernel", pid=0, tid=20, **{"Process Group Name": "1"})
        for ts in (2000, 3000)
    ]
    found = with_ends([call(1, 1.0, None), call(2, 1.1, None)], events, ORIGIN_NS)
    assert [(one.begin_ns - ORIGIN_NS, (one.end_ns or 0) - ORIGIN_NS) for one in found] == [
        (2 * MS, 2_100_000), (3 * MS, 3_100_000),
    ]  # fmt: skip
    (alone,) = with_ends([call(1, 1.0, None)], events, ORIGIN_NS)  # one kernel more than calls: none is taken for it
    assert alone.end_ns is None


def test_calls_that_overlap_have_lanes_of_their_own() -> None:
    other_group = call(1, 2, 3, group="2")
    placed = lanes([call(1, 0, 10), call(2, 5, 12), call(3, 11, 13), other_group])
    assert [(one.number, one.group, one.lane - COLLECTIVES_LANE) for one in placed] == [
        (1, "1", 0), (1, "2", 1), (2, "1", 2), (3, "1", 0),
    ]  # fmt: skip


def test_an_operators_time_is_without_those_it_calls() -> None:
    events = [event("linear", 0, 10), event("addmm", 2, 6), event("copy", 3, 1), event("addmm", 20, 5)]
    assert self_times(events, 77) == {"linear": 4, "addmm": 10, "copy": 1}


# --- all ranks' parts -------------------------------------------------------------------------------------------------


def test_calls_are_joined_by_number_in_their_group() -> None:
    one = header(0, [call(1, 0, 2), call(2, 3, 4), call(9, 5, 6), call(4, 7, 8)])
    other = header(1, [call(1, 1, 2), call(2, 3, 4, "broadcast"), call(4, 8, 9)])
    joins = joined([one, other])
    assert [(join.op, sorted(join.calls), join.calls[0].number) for join in joins] == [
        ("all_reduce", [0, 1], 1),  # not 2: other ops; not 9: one rank alone
        ("all_reduce", [0, 1], 4),
    ]


def test_of_a_smaller_group_its_members_are_joined() -> None:
    pair = {"group": "5", "members": (1, 2)}
    headers = [header(rank, [call(1, rank, 9, **pair)] if rank else [], ranks=3) for rank in range(3)]
    (join,) = joined(headers)
    assert sorted(join.calls) == [1, 2]
    assert joined(headers[:2]) == [], "one member has no part: it met nobody who is here"


def test_clocks_are_aligned_by_the_ends_of_collectives() -> None:
    ends = [10.0, 20.0, 30.0]
    one = header(0, [call(n, end - 1, end) for n, end in enumerate(ends)])
    # its clock is 250 ms ahead; in one of three it noticed the end 5 ms late, and a broadcast does not count
    late = [0.0, 5.0, 0.0]
    calls = [call(n, end + 249, end + 250 + late[n]) for n, end in enumerate(ends)]
    other = header(1, [*calls, call(7, 900, 999, "broadcast")], machine="m1")
    first = header(0, [*one.calls, call(7, 40, 41, "broadcast")])
    headers = [first, other]
    offsets = clock_offsets_ns(headers, joined(headers))
    assert offsets == {"m0": 0, "m1": 250 * MS}
    said = clocks_in_words(headers, offsets)
    assert said == "clocks aligned to host_m0's by the ends of collectives: host_m1 by -250.000 ms"
    same_machine = [first, header(1, calls)]
    assert clock_offsets_ns(same_machine, joined(same_machine)) == {"m0": 0}
    assert clocks_in_words(same_machine, {"m0": 0}) == "one machine, one clock"


def test_an_arrow_goes_from_the_first_that_came_through_all_others() -> None:
    headers = [header(rank, [call(1, begin, 9)], ranks=3) for rank, begin in enumerate([2, 1, 3])]
    found = list(arrows(joined(headers), headers, {"m0": 0}, ORIGIN_NS))
    assert [(e["ph"], e["pid"], e["ts"]) for e in found] == [("s", 1, 1000.0), ("t", 0, 2000.0), ("f", 2, 3000.0)]
    assert {(e["id"], e["cat"], e["name"]) for e in found} == {(FLOW_IDS, "collective", "all_reduce")}


def test_the_three_largest_things_are_said() -> None:
    facts = {"phase_us": {"data": 2000.0, "forward": 6000.0}, "operator_us": {"aten::mm": 900.0, "aten::add": 10.0}}
    one = header(0, [call(1, 0, 5), call(2, 10, 14)], **facts)
    other = header(1, [call(1, 4, 5), call(2, 12, 14)], **facts)
    assert in_words([one, other], joined([one, other]), {"m0": 0}) == (
        "a step took 4 ms: forward 75 %, data 25 %",
        "collectives a step: 1; most is waited for rank 1, which came last to 2 of 2, 3 ms after the first",
        "most time in one operator: aten::mm, 0.45 ms a step",
    )


def written(traces: Path, one: Header, events: list[Any]) -> Path:
    path = part_path(traces, "steps_3-4", one.rank)
    write_part(path, one, events)
    return path


def test_parts_are_merged_and_another_machines_are_moved(tmp_path: Path) -> None:
    parts = [
        written(tmp_path, header(0, [call(1, 10, 20)]), [event("a", 5.0, 1.0, pid=0)]),
        written(
            tmp_path, header(1, [call(1, 260, 270)], "m1", origin_ns=ORIGIN_NS + 10 * MS), [event("b", 7.0, 1.0, pid=1)]
        ),
    ]
    merged = merge(tmp_path, "steps_3-4", parts)
    assert (merged.ranks, merged.missing, merged.joined) == ((0, 1), (), 1)
    trace = json.loads(gzip.decompress(merged.path.read_bytes()))
    assert trace["safetrain"]["clocks"].endswith("host_m1 by -250.000 ms")
    times = {e["name"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert times == {"a": 5.0, "b": 7.0 + 10_000 - 250_000}
    assert [(e["ph"], e["ts"]) for e in trace["traceEvents"] if e["ph"] in "sf"] == [("s", 10_000.0), ("f", 10_000.0)]
    assert not any(path.exists() for path in parts)


def test_a_rank_without_a_part_is_named_and_the_parts_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = tmp_path / "traces"
    for rank in (0, 2):
        written(traces, header(rank, [call(1, rank, 9)], ranks=4), [event("a", 5.0, 1.0, pid=rank)])
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "profile: steps 3-4 of 2 ranks in" in out
    assert "ranks 1 and 3 have no part in it" in out
    assert len(list((traces / "parts").iterdir())) == 2
    trace = json.loads(gzip.decompress((traces / "steps_3-4.json.gz").read_bytes()))
    assert trace["safetrain"] == {
        "ranks": 4, "missing": [1, 3], "clocks": "one machine, one clock", "collectives_joined": 1,
    }  # fmt: skip


def test_the_command_says_what_it_wants_and_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 2
    assert "usage: python -m safetrain.profile <run directory>" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "holds no parts of a trace: run it with profile=steps" in capsys.readouterr().err


def test_a_whole_trace_is_told_with_the_way_to_open_it(tmp_path: Path) -> None:
    merged = merge(tmp_path, "steps_3-4", [written(tmp_path, header(0, [], ranks=1), [])])
    lines = told(merged).splitlines()
    assert lines[0].startswith(f"profile: steps 3-4 of 1 rank in {tmp_path / 'steps_3-4.json.gz'} (")
    assert lines[1:] == ["  open it at https://ui.perfetto.dev or chrome://tracing; nothing is uploaded"]


def test_what_an_earlier_process_left_of_the_window_is_gone_before_it(tmp_path: Path) -> None:
    """A run that was killed before its parts were merged, and goes on: rank 0 would take the old one of a rank that is
    still writing its new one."""
    old = part_path(tmp_path / "traces", "steps_20-24", 1)
    old.parent.mkdir(parents=True)
    old.touch()
    observer = StepProfile(20, 5)
    observer.start(RunInfo(
        rank=1, world_size=2, run_dir=tmp_path, name="", epochs=1, steps_per_epoch=99, max_steps=None, start_step=10,
        config_text="", device="cpu", parameters=1,
    ))  # fmt: skip
    observer.close()
    assert not old.exists()
