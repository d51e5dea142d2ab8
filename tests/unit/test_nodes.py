"""Launchers that meet over real connections, in threads of one process; none of them starts a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from safetrain import link, machine, nodes
from safetrain.cluster import launch_said
from safetrain.crew import Follower, LauncherLost, Leader, crew_of
from safetrain.errors import UsageError
from safetrain.failure import Exit, Failure
from safetrain.launch_config import Launch
from safetrain.link import Link
from safetrain.orders import Outcome, Published, Report, Share

KEYS = {"recipe": "mine", "optimizer.lr": "0.1"}
LIMIT_S = 10.0  # for what is over in milliseconds
VERSIONS = {"torch": "2.13.0", "python": "3.11.4"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def options(number: int, count: int = 2, port: int = 0, host: str = "localhost", **more: Any) -> Launch:
    return Launch(
        **{"nnodes": count, "node_rank": number, "rdzv_endpoint": f"{host}:{port}", "join_timeout_s": LIMIT_S, **more}
    )


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, or the UsageError that it raises, as text; all run at the same time."""
    said: list[Any] = ["nothing"] * len(calls)

    def call(index: int) -> None:
        try:
            said[index] = calls[index]()
        except UsageError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return said


def meetings(launches: Sequence[Launch], keys: dict[int, dict[str, str]] | None = None) -> list[Any]:
    """What becomes of launchers that meet: the numbers of the others they know, or why not."""

    def meet(launch: Launch, own: dict[str, str]) -> list[int]:
        with crew_of(launch, own) as crew:
            assert crew is not None
            return sorted(crew._met.peers)

    owns = [(keys or {}).get(index, KEYS) for index in range(len(launches))]
    pairs = zip(launches, owns, strict=True)
    return at_once(*(lambda launch=launch, own=own: meet(launch, own) for launch, own in pairs))


def test_all_launchers_meet_whoever_comes_first() -> None:
    port = free_port()
    assert meetings([options(number, 3, port) for number in (2, 1, 0)]) == [[0], [0], [1, 2]]


def test_a_launcher_that_does_not_come_is_named_by_those_that_did() -> None:
    port = free_port()
    said = meetings([options(number, 3, port, join_timeout_s=0.5) for number in (0, 2)])
    assert said[0] == said[1]
    here = machine.host()
    assert said[0].startswith(f"node 1 of 3 did not come within 0.5 s. Here: node 0 ({here}, ")
    assert f", node 2 ({here}, " in said[0]
    assert f"launch.node_rank=1, and does that machine reach localhost:{port}" in said[0]


def test_without_node_0_there_is_nobody_at_the_address() -> None:
    port = free_port()
    (said,) = meetings([options(1, 2, port, join_timeout_s=0.5)])
    assert said.startswith(f"node 1 on {machine.host()} found nobody at localhost:{port} (")
    assert "Connection refused" in said
    assert "launch.rdzv_endpoint" in said


@pytest.mark.parametrize("number", [0, 1])
def test_two_launchers_with_one_number(number: int) -> None:
    port = free_port()
    said = meetings([options(each, 3, port, join_timeout_s=1.0) for each in (0, 1, number)])
    if number == 1:
        assert len(set(said)) == 1
        assert said[0].startswith(f"two launchers have launch.node_rank=1: process {os.getpid()} on {machine.host()}")
    else:
        taken = next(text for text in said if "can't be opened" in text or "is taken by" in text)
        assert f"port {port} on {machine.host()}, where node 0 is to meet the others" in taken
        assert "two launchers have launch.node_rank=0" in taken


def test_configs_that_differ_are_told_on_both_with_the_key_and_both_values() -> None:
    other = {"recipe": "mine", "optimizer.lr": "0.2", "+vars.x": "1"}
    said = meetings([options(number, 2, port) for port in [free_port()] for number in (0, 1)], {1: other})
    assert said[0] == said[1]
    here = machine.host()
    assert "have not the same config:" in said[0]
    assert f"  optimizer.lr: 0.1 on {here}, 0.2 on {here}" in said[0]
    assert f"  +vars.x: (none) on {here}, 1 on {here}" in said[0]
    assert "only launch.node_rank, launch.nproc_per_node and launch.rdzv_endpoint may differ" in said[0]


def test_a_port_that_is_taken_is_told_with_its_holder() -> None:  # H76
    with socket.socket() as stranger:
        stranger.bind(("", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        said = meetings([options(0, 2, port)])[0]
    assert said.startswith(f"port {port} on {machine.host()}, where node 0 is to meet the others, ")


def test_a_launcher_that_leaves_before_all_are_there_is_named() -> None:
    port = free_port()

    def comes_and_goes() -> None:
        visit = None
        while visit is None:
            visit = nodes._Visit.of(options(1, 3, port), "localhost", port, KEYS)
        assert visit.answered()
        visit.met.link.close()

    said = at_once(lambda: meetings([options(0, 3, port)])[0], comes_and_goes)
    assert said[0].startswith(f"node 1 ({machine.host()}, ")
    assert said[0].endswith(" came, and left again before all were there: see its terminal.")


def test_a_config_that_one_machine_can_not_compose_is_told_by_node_0_at_once() -> None:
    port = free_port()
    arguments = ["launch=cluster", "launch.nnodes=3", "launch.node_rank=2", f"launch.rdzv_endpoint=localhost:{port}"]
    launch = launch_said(arguments, {})
    assert launch is not None
    assert (launch.nodes, launch.number, launch.endpoint) == (3, 2, ("localhost", port))
    assert launch_said(["launch=cluster", "launch.nnodes=3"], {}) is None
    assert launch_said(["launch=cluster", "launch.nnodes=many"], {}) is None

    def refuses() -> None:
        until(lambda: _listens(port))
        nodes.tell_node_0(launch, "loop.epchs=3: no such key")

    said = at_once(lambda: meetings([options(0, 3, port)])[0], refuses)
    assert said[0].startswith(f"node 2 ({machine.host()}, ")
    assert said[0].endswith(" has ended: loop.epchs=3: no such key")


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
        return True
    return False


def test_a_program_that_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:  # H76: a web server on that port
    monkeypatch.setattr(nodes, "_GREETING_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        (said,) = meetings([options(1, 2, stranger.getsockname()[1], host="127.0.0.1")])
    assert "but it is not node 0 of a training job" in said


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["no-such-host.invalid", "127.0.0.1 "])
def test_a_name_that_nobody_knows(number: int, name: str) -> None:  # H77
    (said,) = meetings([options(number, 2, 29_500, host=name)])
    assert said.startswith(f"launch.rdzv_endpoint={name!r}: {machine.host()} knows no machine of that name")


def test_node_0_at_the_address_of_another_machine() -> None:
    (said,) = meetings([options(0, 2, 29_500, host="198.51.100.1")])  # reserved for documentation: nobody has it
    assert said.startswith(f"launch.rdzv_endpoint=198.51.100.1:29500: that is not {machine.host()}, where node 0 runs")


def test_what_goes_wrong_on_one_machine_is_told_on_the_other() -> None:
    port = free_port()

    def refuses() -> None:
        with crew_of(options(1, 2, port), KEYS):
            raise UsageError("model.widht: no such key")

    def waits() -> None:
        with crew_of(options(0, 2, port), KEYS) as crew:
            assert isinstance(crew, Leader)
            crew.agree(2, VERSIONS, "localhost")

    said = at_once(waits, refuses)
    assert said[1] == "model.widht: no such key"
    assert said[0].startswith(f"node 1 ({machine.host()}, ")
    assert said[0].endswith(" has ended: model.widht: no such key")


# --- while a job runs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def crew(count: int = 2, timeout_s: float = LIMIT_S) -> Iterator[list[Any]]:
    """The leader and the followers, met."""
    port = free_port()
    launches = [options(number, count, port) for number in range(count)]
    met = at_once(*(lambda launch=launch: nodes.meet_nodes(launch, KEYS) for launch in launches))
    people: list[Any] = [Leader(met[0], timeout_s, 0.0), *(Follower(each, timeout_s) for each in met[1:])]
    try:
        yield people
    finally:
        for each in people:
            each._met.link.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_are_numbered_over_machines_with_different_numbers_of_them() -> None:
    with crew(3) as (leader, *others):
        for ranks, other in zip((4, 1), others, strict=True):
            other.say({"kind": "ready", "ranks": ranks, "versions": VERSIONS})
        leader.agree(2, VERSIONS, "hosta")
        assert [share.numbers for share in leader.shares] == [[0, 1], [2, 3, 4, 5], [6]]
        assert leader.start("the config", 1234) == Share(0, 2, 7, 0, 3, "hosta", 1234)
        said = [other.next() for other in others]
        assert [message["config"] for message in said] == ["the config"] * 2
        assert Share(**said[1]["share"]) == Share(6, 1, 7, 2, 3, "hosta", 1234)
        assert Share(**said[0]["share"]).in_words() == "ranks 2-5"


def test_other_versions_are_told_with_both_values() -> None:
    with crew() as (leader, other):
        other.say({"kind": "ready", "ranks": 2, "versions": VERSIONS | {"torch": "2.12.1"}})
        with pytest.raises(UsageError, match=r"have not the same versions:\n  torch: 2\.13\.0 on .*, 2\.12\.1 on "):
            leader.agree(2, VERSIONS, "hosta")


def test_a_failure_on_one_machine_ends_all_and_what_is_known_there_comes_along() -> None:
    record = Failure.of(ValueError("bad label"), 2, victim=False)
    report = Report(
        False, [Exit(3, 77, -9, "in training_step at step 5", "hostb", "last words")], [record], Published("a", 1)
    )
    with crew(3) as (leader, failed, third):
        assert not any(each.end_wanted() for each in (leader, failed, third))
        failed.ending(None)
        until(lambda: leader.end_wanted() and third.end_wanted())
        assert leader.signalled is third.signalled is None
        failed.say(report.to_message())
        third.say(Report(True).to_message())
        assert sorted(leader.gather(ok=False), key=lambda each: each.ok) == [report, Report(True, [], [])]


def test_a_signal_on_one_machine_is_known_on_all() -> None:
    with crew(3) as (leader, told, third):
        told.ending(signal.SIGTERM)
        until(lambda: leader.end_wanted() and third.end_wanted())
        assert leader.signalled == third.signalled == told.signalled == (signal.SIGTERM, machine.host())
        leader.shares = [Share(0, 1, 3)] * 3
        leader.start("", 1)  # another attempt
        assert third.next()["kind"] == "go"
        assert not third.end_wanted()
        assert leader.signalled is third.signalled is None


def test_a_launcher_that_is_killed_is_noticed_at_once() -> None:
    with crew(3) as (leader, killed, third):
        killed._met.link.close()
        until(lambda: leader.end_wanted() and third.end_wanted())
        assert leader.lost == {1: "its connection was closed"}
        third.say(Report(False).to_message())
        assert leader.gather(ok=False) == [Report(False, [], [])]


def test_a_machine_that_is_silent_is_lost_and_so_is_node_0() -> None:
    with crew(timeout_s=1.0) as (leader, other):
        for each in (leader, other):  # as where a cable is pulled: connections stay, nothing comes
            each._met.link._beats = False
        until(leader.end_wanted)
        until(other.end_wanted)
        assert leader.lost == {1: "silent for 1 s"}
        with pytest.raises(LauncherLost, match="silent for 1 s"):
            other.next()
        assert leader.gather(ok=False) == []


def test_one_that_beats_and_does_not_say_how_its_ranks_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.crew._END_SLACK_S", 0.5)
    with crew() as (leader, _):
        assert leader.gather(ok=False) == []
        assert leader.lost == {1: "its launcher did not say how its ranks ended"}


def test_all_read_the_verdict_before_node_0_leaves() -> None:
    with crew() as (leader, other):
        heard = at_once(
            lambda: leader.tell(Outcome("it failed", 1)),
            lambda: (other.next(), other._met.link.close()),
        )
        assert heard[1][0] == {"kind": "outcome", "text": "it failed", "exit_code": 1, "metric": None, "again": False}


def test_one_too_many_is_sent_away() -> None:
    with crew() as (leader, _):
        port = leader._met.link._listener.getsockname()[1]
        late = threading.Thread(target=lambda: said.extend(meetings([options(1, 2, port)])))
        said: list[Any] = []
        late.start()
        until(lambda: leader.end_wanted() or not late.is_alive())
        late.join()
        assert said == [f"the job of {leader.me} has all its launchers: this one is too many."]


def test_a_stopped_process_does_not_take_the_others_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_STOPPED_S", 0.0)  # every look is a late one
    with crew(timeout_s=0.01) as (leader, _):
        for _ in range(20):
            assert not leader.end_wanted()
            time.sleep(0.02)


def test_a_stranger_that_sends_something_else_is_hung_up_on() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    carrier = Link(listener)
    try:
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until(lambda: any(wire.end for wire in carrier._wires))
        assert carrier.take() == []
        assert carrier._wires[0].end == "it is no launcher of safetrain"
    finally:
        carrier.close()
