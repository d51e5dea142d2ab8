"""Ranks that cannot meet end within seconds, all with the same words: who is missing, who is there twice, what port."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection

import pytest

from safetrain import joining, network
from safetrain.errors import UsageError
from safetrain.joining import Place, meet

LIMIT_S = 3.0
PROMISED_S = 2 * LIMIT_S + 6  # to reach the address, to wait there; a loaded machine


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _attempt(
    answer: Connection, rank: int, size: int, delay_s: float, stay_s: float, variables: dict[str, str]
) -> None:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ.update(variables)
    time.sleep(delay_s)
    try:
        meeting = meet(rank, size, LIMIT_S)
        answer.send(f"met {len(meeting.places)}")
        meeting.store.add("done", 1)
        leave = time.monotonic() + stay_s
        while meeting.store.add("done", 0) < size or time.monotonic() < leave:  # rank 0 serves the store: it stays
            time.sleep(0.01)
    except UsageError as error:
        answer.send(str(error))
    os._exit(0)


def attempts(
    *ranks: tuple[int, int],
    port: int = 0,
    delay_s: dict[int, float] | None = None,
    stay_s: float = 0.0,
    **more: str,
) -> list[str]:
    """What each process, given as (RANK, WORLD_SIZE), has to say; all are gone within the promised time."""
    context = multiprocessing.get_context("fork")
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), **more}
    begin, pipes, processes = time.monotonic(), [], []
    for index, (rank, size) in enumerate(ranks):
        receiver, sender = context.Pipe(duplex=False)
        delay = (delay_s or {}).get(index, 0.0)
        process = context.Process(target=_attempt, args=(sender, rank, size, delay, stay_s, variables))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    said = []
    for receiver in pipes:
        said.append(receiver.recv() if receiver.poll(PROMISED_S) else "nothing")
        receiver.close()
    for process in processes:
        process.join(PROMISED_S)
        process.kill()
        process.join()
    assert time.monotonic() - begin < PROMISED_S + max((delay_s or {0: 0}).values())
    return said


def test_all_ranks_meet() -> None:
    assert attempts((0, 4), (1, 4), (2, 4), (3, 4)) == ["met 4"] * 4
    assert attempts((0, 2), (1, 2), delay_s={0: 1.0}) == ["met 2"] * 2  # whoever comes first


@pytest.mark.parametrize(("present", "missing"), [([0, 1, 2], "rank 3"), ([0, 3], "ranks 1 and 2")])
def test_a_rank_that_does_not_come_is_named_by_all_that_did(present: list[int], missing: str) -> None:  # H73
    said = attempts(*((rank, 4) for rank in present))
    assert len(set(said)) == 1
    assert said[0].startswith(
        f"{missing} of 4 did not come within 3 s. Here are rank 0 ({socket.gethostname()}, process"
    )
    assert "launch.join_timeout_s" in said[0]


@pytest.mark.exhaustive
def test_without_rank_0_there_is_nobody_at_the_address() -> None:
    (said,) = attempts((1, 2))
    assert said.startswith("rank 1 on ")
    assert "found nobody at 127.0.0.1:" in said
    assert "Connection refused" in said


@pytest.mark.exhaustive
def test_world_sizes_that_differ_are_told_at_once() -> None:  # H74
    said = attempts((0, 2), (1, 3))
    assert len(set(said)) == 1
    assert "was started with WORLD_SIZE=3, rank 0 with 2" in said[0]


@pytest.mark.parametrize("last", [1, 3])
def test_a_rank_that_is_there_twice_is_told_with_both_processes(last: int) -> None:  # H74
    size = last + 1
    said = attempts(*((rank, size + 1) for rank in range(size)), (last, size + 1))
    assert len(set(said)) == 1
    assert said[0].startswith(f"two processes have RANK={last}: process ")
    assert "Use one launcher." in said[0]


@pytest.mark.exhaustive
def test_a_launcher_inside_a_launcher() -> None:  # H74: four processes, RANK 0, 1, 0, 1, of WORLD_SIZE 2
    said = attempts((0, 2), (1, 2), (0, 2), (1, 2), stay_s=1.0)
    assert sum("two processes have RANK=" in words for words in said) >= 2
    assert any("is taken by process" in words for words in said)


@pytest.mark.exhaustive
def test_a_second_process_of_a_rank_that_comes_late_is_refused_and_the_others_train_on() -> None:
    said = attempts((0, 2), (1, 2), (1, 2), delay_s={1: 0.5, 2: 1.5}, stay_s=1.5)
    assert said[:2] == ["met 2", "met 2"]
    assert said[2].startswith("two processes have RANK=1: process ")


def test_a_port_that_is_taken_is_told_with_its_holder() -> None:  # H76
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        said = attempts((0, 2), (1, 2), port=port)
    assert f"port {port} on " in said[0]
    assert f"is taken by process {os.getpid()} (" in said[0]
    assert "is not rank 0 of a training job" in said[1]
    assert f"process {os.getpid()} (" in said[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["no-such-host.invalid", "127.0.0.1 "])
def test_a_name_that_nobody_knows(rank: int, name: str) -> None:  # H77
    (said,) = attempts((rank, 2), MASTER_ADDR=name)
    assert said.startswith(f"MASTER_ADDR={name!r}: {socket.gethostname()} knows no machine of that name")
    assert ("begins or ends with a blank" in said) == name.endswith(" ")


@pytest.mark.exhaustive
def test_rank_0_at_an_address_of_another_machine() -> None:
    (said,) = attempts((0, 2), MASTER_ADDR="198.51.100.1")  # reserved for documentation: nobody has it
    assert "MASTER_ADDR=198.51.100.1: that is not " in said


def test_a_port_that_is_no_number() -> None:
    (said,) = attempts((1, 2), MASTER_PORT="eight")
    assert said == "MASTER_PORT='eight': must be a whole number, 1-65535"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "why"), [("^lo", "that is NCCL_SOCKET_IFNAME's syntax"), ("eth987", "no such interface")]
)
def test_an_interface_that_is_not_there(name: str, why: str) -> None:  # H78
    (said,) = attempts((1, 2), GLOO_SOCKET_IFNAME=name)
    assert said.startswith(f"GLOO_SOCKET_IFNAME={name}: {why}")
    assert "lo" in said


@pytest.mark.exhaustive
def test_an_address_that_only_means_the_machine_itself(monkeypatch: pytest.MonkeyPatch) -> None:  # H78
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: [(2, 1, 6, "", ("127.0.1.1", 0))])
    assert network.gloo_address() == "127.0.1.1"
    here, there = Place(0, 2, "a", 1, "127.0.1.1"), Place(1, 2, "b", 2, "10.0.0.2")
    assert "GLOO_SOCKET_IFNAME" in joining._unreachable([here, there])
    assert "rank 0 (a, process 1)" in joining._unreachable([here, there])
    assert joining._unreachable([here, Place(1, 2, "a", 2, "127.0.1.1")]) == ""  # one machine may
