"""What node 0 makes of several machines: one verdict, told on each; and what a machine's own name is worth."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safetrain import joining, machine, network, retelling
from safetrain.alone import Alone
from safetrain.config import Checkpoint
from safetrain.crew import Follower, Leader
from safetrain.errors import ConfigError
from safetrain.failure import Exit, Failure
from safetrain.joining import Meeting, Place
from safetrain.launch_config import Launch
from safetrain.machines import environment_of, lost_in_words, saves, verdict_on_lost, verdict_on_machines
from safetrain.nodes import Node
from safetrain.orders import Report, Share
from safetrain.verdict import Verdict

A, B = Node(0, "hosta", 1, "10.0.0.1"), Node(1, "hostb", 2, "10.0.0.2")


def crew(kind: type[Any] = Leader, lost: str = "") -> Any:
    """Two machines with two ranks each; ``lost``: why the second is gone."""
    found = object.__new__(kind)
    found.me, found.lost = A, {1: lost} if lost else {}
    found._met = SimpleNamespace(peers={1: SimpleNamespace(node=B)})
    found.shares = [Share(0, 2, 4, 0, 2), Share(2, 2, 4, 1, 2)]
    return found


def failure(rank: int, host: str, *, victim: bool, when: int) -> Failure:
    record = Failure.of(ValueError("bad label"), rank, victim=victim)
    return Failure(**{**vars(record), "host": host, "time_ns": when})


def test_the_culprit_is_found_in_another_machines_records(tmp_path: Path) -> None:
    failure(0, "hosta", victim=True, when=1).write(tmp_path)
    reports = [Report(False, [], [failure(3, "hostb", victim=False, when=2)])]
    verdict = verdict_on_machines(tmp_path, crew(), [], reports)
    assert verdict.sentence.startswith("Training failed on rank 3 (hostb, process ")
    assert verdict.others == ("Ranks 0-2 did not fail: ended because rank 3 did.",)


def test_a_rank_that_ended_without_a_word_elsewhere_is_told_with_its_host_and_its_log(tmp_path: Path) -> None:
    reports = [Report(False, [Exit(2, 77, -9, "in training_step at step 5", "hostb", "one\nlast words\n")])]
    verdict = verdict_on_machines(tmp_path, crew(), [], reports)
    assert verdict.sentence.startswith("Training failed: rank 2 (hostb, process 77) was killed by SIGKILL")
    assert "  last words" in verdict.evidence


def test_a_lost_machine_is_the_story_unless_a_rank_failed_by_itself(tmp_path: Path) -> None:
    lost = crew(lost="silent for 15 s")
    failure(0, "hosta", victim=True, when=1).write(tmp_path)
    verdict = verdict_on_machines(tmp_path, lost, [], [])
    assert verdict.sentence == "Training failed: node 1 (hostb, 10.0.0.2), with ranks 2 and 3, is silent for 15 s."
    assert verdict.culprits == (2, 3)
    assert "launch.node_timeout_s" in verdict.remedy
    failure(1, "hosta", victim=False, when=2).write(tmp_path)
    verdict = verdict_on_machines(tmp_path, lost, [], [])
    assert verdict.sentence.startswith("Training failed on rank 1 (hosta, ")
    assert verdict.others[-1] == "Also, node 1 (hostb, 10.0.0.2), with ranks 2 and 3, is silent for 15 s."
    assert lost_in_words(lost) == "\nAlso, node 1 (hostb, 10.0.0.2), with ranks 2 and 3, is silent for 15 s.\n"
    assert lost_in_words(Alone(2)) == lost_in_words(crew()) == ""


def test_a_launcher_that_was_killed_is_no_slow_network() -> None:
    verdict = verdict_on_lost([(B, None, "its connection was closed")])
    assert verdict.sentence == "Training failed: node 1 (hostb, 10.0.0.2) is gone: its connection was closed."
    assert "was killed, or hostb went down" in verdict.cause
    assert "node_timeout_s" not in verdict.remedy


def test_when_nothing_is_saved_a_run_directory_need_not_be_shared() -> None:
    never: dict[str, Any] = {"every_steps": None, "every_minutes": None, "every_epochs": None, "at_end": False}
    assert not saves(Checkpoint(**never))
    for key, value in {"every_steps": 1, "every_minutes": 0.5, "every_epochs": 1, "at_end": True}.items():
        assert saves(Checkpoint(**{**never, key: value}))


def test_each_machine_keeps_what_its_own_shell_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    config: Any = SimpleNamespace(env={"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 1})
    assert environment_of(config, crew()) == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}
    assert environment_of(config, crew(Follower)) == {"NCCL_IB_DISABLE": "1"}
    assert environment_of(config, crew(Follower), ["NCCL_DEBUG"]) == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}


def test_a_name_that_means_only_the_machine_itself_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # H78
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network, "gloo_address", lambda: "127.0.1.1")
    monkeypatch.setattr(network, "interface_of", {"10.0.0.1": "eth0"}.get)
    assert environment_of(SimpleNamespace(env={}), crew()) == {"GLOO_SOCKET_IFNAME": "eth0"}  # type: ignore[arg-type]
    assert "is a name for 127.0.1.1 here: GLOO_SOCKET_IFNAME=eth0 instead." in capsys.readouterr().out
    assert environment_of(SimpleNamespace(env={}), Alone(2)) == {}  # type: ignore[arg-type]


def test_the_interface_of_an_address() -> None:
    assert network.interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    assert network.interface_of("198.51.100.1") == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nnodes": 2}, "launch.nnodes=2 needs launch.rdzv_endpoint=host:port"),
        ({"nnodes": 2, "rdzv_endpoint": "a:1", "node_rank": 2}, "launch.node_rank=2: must be below launch.nnodes=2"),
        ({"nnodes": 0}, "launch.nnodes=0: must be at least 1"),
        ({"rdzv_endpoint": "node0"}, "launch.rdzv_endpoint=node0: must be host:port"),
        ({"rdzv_endpoint": "node0:0"}, "launch.rdzv_endpoint=node0:0: must be host:port"),
        ({"rdzv_endpoint": ":29500"}, "launch.rdzv_endpoint=:29500: must be host:port"),
        ({"node_timeout_s": 1}, "launch.node_timeout_s=1: must be at least 2"),
        ({"nnode": 2}, "launch.nnode: no such key. Did you mean nnodes?"),
    ],
)
def test_what_can_not_be_is_refused_before_anybody_meets(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Launch.parse(values)
    assert message in str(refused.value)


def test_an_address_of_ipv6() -> None:
    assert Launch(rdzv_endpoint="[fe80::1]:29500").endpoint == ("fe80::1", 29500)


# --- told on each machine -------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is on another machine."""
    places = (Place(0, 2, "a", os.getpid(), "", machine.identity()), Place(1, 2, "b", 1, "", "b/boot/pid"))
    monkeypatch.setattr(joining, "_current", Meeting(None, places))  # type: ignore[arg-type]


def test_a_verdict_of_this_machine_is_not_told_again(elsewhere: None, tmp_path: Path) -> None:
    Verdict("it failed").publish(tmp_path)
    assert retelling.retold(tmp_path, 0.5) == ""


def test_a_verdict_of_another_machine_is_told_once(elsewhere: None, tmp_path: Path) -> None:
    Verdict("it failed").publish(tmp_path)
    path = tmp_path / "failure.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine": "b/boot/pid"}))
    assert retelling.retold(tmp_path, 0.5).startswith("it failed")
    assert retelling.retold(tmp_path, 0.5) == ""  # by the second rank of this machine


def test_on_one_machine_nobody_waits_for_what_another_tells(tmp_path: Path) -> None:
    assert not retelling.several_machines()
    assert retelling.retold(tmp_path, 60) == ""
