"""One job on two hosts, for real: it trains as on one. Whatever happens to a host or to the cable between them, both
terminals say so within seconds, with the host's name and its ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from safetrain.checkpoint import find, read
from safetrain.comm import Comm
from safetrain.config import Config
from safetrain.testing import run_ranks
from safetrain.worker import build
from tests.faults import hosts
from tests.faults.hosts import Hosts, Said, two_hosts
from tests.launch.project import Project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(hosts.obstacle()), reason=hosts.obstacle() or "-"),
]
exhaustive = pytest.mark.exhaustive

SILENCE_S = 4.0
ENDLESS = ("loop.epochs=100000", "loop.max_steps=null", "checkpoint.every_epochs=null", "launch.grace_s=1",
           f"launch.node_timeout_s={SILENCE_S}")  # fmt: skip
JOIN_S = 6.0
PROMISED_S = SILENCE_S + 1 + 5.0 + 5.0  # silence, grace, the other's answer; a loaded machine
SAVES_NOTHING = ("checkpoint.every_minutes=null", "checkpoint.every_epochs=null", "checkpoint.at_end=false")


@pytest.fixture
def two() -> Iterator[Hosts]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Project.create(tmp_path).folder


def launch(two: Hosts, folder: Path, *arguments: str, **environment: str) -> list[subprocess.Popen[str]]:
    """The same command on both hosts."""
    return [
        host.launch(folder, number, two.endpoint, *arguments, **environment)
        for number, host in enumerate((two.a, two.b))
    ]


def both(two: Hosts, launchers: list[subprocess.Popen[str]]) -> tuple[Said, Said]:
    return two.finish(launchers[0]), two.finish(launchers[1])


def train(two: Hosts, folder: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Both hosts in the middle of a training that does not end by itself."""
    launchers = launch(two, folder, *ENDLESS, *arguments)
    two.wait_for(lambda: len(list(folder.glob("outputs/*/*/stepping_*"))) == 4, "training")
    return launchers


def listens(two: Hosts) -> bool:
    """Whether node 0 waits for the others."""
    for pid in two.a.processes():
        with suppress(OSError):
            if f":{hosts.PORT:04X} " in Path(f"/proc/{pid}/net/tcp6").read_text():
                return True
    return False


def weights_of_one_host(comm: Comm, file: str) -> dict[str, Any]:
    trainer = build(Config.from_yaml(Path(file).read_text()))
    trainer.fit()
    return trainer.model.state_dict()


def test_two_hosts_train_as_one_does_and_the_second_may_come_later(
    two: Hosts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = two.a.launch(folder, 0, two.endpoint)
    two.wait_for(lambda: listens(two), "node 0 at its port")
    said = both(two, [first, two.b.launch(folder, 1, two.endpoint)])
    assert [each.code for each in said] == [0, 0], said
    assert "mine: 4 ranks on 2 machines, outputs/mine/" in said[0].text
    assert "mine: node 1 (hostb, 10.77.0.2) runs ranks 2 and 3 of 4 for node 0 (hosta, 10.77.0.1)" in said[1].text
    [run_dir] = folder.glob("outputs/*/*")  # one for all, and nothing of the second's own
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == [f"rank_{rank}.log" for rank in range(4)]
    # on one host, with as many ranks
    alone = folder / "alone"
    alone.mkdir()
    text = (run_dir / "config.yaml").read_text().replace(str(run_dir), str(alone))
    (alone / "config.yaml").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    weights = run_ranks(weights_of_one_host, 4, str(alone / "config.yaml"))[0]
    saved = read(*find(run_dir)).shared["model"]
    assert set(saved) == set(weights)
    assert all(torch.equal(saved[name], weights[name]) for name in weights)  # bit for bit
    assert json.loads((run_dir / "result.json").read_text())["step"] == 2  # they are no longer those of the start


def test_the_cable_is_pulled_out(two: Hosts, folder: Path) -> None:
    launchers = train(two, folder)
    two.b.cut()
    a, b = both(two, launchers)
    assert (a.code, b.code) == (1, 1)
    assert a.seconds + b.seconds < PROMISED_S
    silent = f"is silent for {SILENCE_S:.0f} s."
    assert f"Training failed: node 1 (hostb, 10.77.0.2), with ranks 2 and 3, {silent}" in a.text
    assert f"Training failed: node 0 (hosta, 10.77.0.1) {silent}" in b.text
    assert (
        "node 1 (hostb, 10.77.0.2), which ran ranks 2 and 3, has ended because it can't reach node 0 any more" in b.text
    )


@exhaustive
@pytest.mark.parametrize("number", [0, 1])
def test_all_processes_of_a_host_are_killed(two: Hosts, folder: Path, number: int) -> None:
    launchers = train(two, folder)
    os.killpg(launchers[number].pid, signal.SIGKILL)
    said = both(two, launchers)
    left = said[1 - number]
    assert left.code == 1
    assert left.seconds < PROMISED_S - SILENCE_S
    who = ("node 0 (hosta, 10.77.0.1) is gone:", "node 1 (hostb, 10.77.0.2), with ranks 2 and 3, is gone:")[number]
    assert f"Training failed: {who} its connection" in left.text


@pytest.mark.exhaustive
def test_other_torch_and_other_config_are_refused_on_both(two: Hosts, folder: Path) -> None:
    source = folder / "mine.py"
    source.write_text(f"{source.read_text()}\nif os.environ.get('OTHER'):\n    torch.__version__ = '2.12.1'\n")
    launchers = [two.a.launch(folder, 0, two.endpoint), two.b.launch(folder, 1, two.endpoint, OTHER="1")]
    for said in both(two, launchers):
        assert said.code == 2
        assert "node 0 (hosta, 10.77.0.1) and node 1 (hostb, 10.77.0.2) have not the same versions:" in said.text
        assert f"  torch: {torch.__version__} on hosta, 2.12.1 on hostb" in said.text
    launchers = [two.a.launch(folder, 0, two.endpoint), two.b.launch(folder, 1, two.endpoint, "optimizer.lr=0.2")]
    for said in both(two, launchers):
        assert said.code == 2
        assert "have not the same config:\n  optimizer.lr: 0.1 on hosta, 0.2 on hostb" in said.text
    assert not list(folder.glob("outputs/*/*"))


@pytest.mark.exhaustive
def test_a_host_that_never_comes_or_that_nobody_lets_through(two: Hosts, folder: Path) -> None:
    waits = f"launch.join_timeout_s={JOIN_S}"
    two.b.refuse("blackhole", two.a)  # a firewall that drops: nothing comes back
    launchers = launch(two, folder, waits)
    a, b = both(two, launchers)
    assert (a.code, b.code) == (2, 2)
    assert f"node 1 of 2 did not come within {JOIN_S:g} s. Here: node 0 (hosta, 10.77.0.1)" in a.text
    assert f"node 1 on hostb found nobody at hosta:{hosts.PORT} (10.77.0.1) for {JOIN_S:g} s" in b.text
    assert "no firewall may be between" in b.text


@exhaustive
def test_a_host_that_is_never_started(two: Hosts, folder: Path) -> None:
    said = two.finish(two.a.launch(folder, 0, two.endpoint, f"launch.join_timeout_s={JOIN_S}"))
    assert said.code == 2
    assert f"node 1 of 2 did not come within {JOIN_S:g} s. Here: node 0 (hosta, 10.77.0.1)" in said.text
    assert "Was the same command started there, with launch.node_rank=1" in said.text


@exhaustive
def test_answers_that_a_firewall_drops(two: Hosts, folder: Path) -> None:
    two.a.refuse("blackhole", two.b)
    a, b = both(two, launch(two, folder, f"launch.join_timeout_s={JOIN_S}"))
    assert "node 1 of 2 did not come" in a.text
    assert f"found nobody at hosta:{hosts.PORT} (10.77.0.1) for {JOIN_S:g} s: timed out" in b.text


@exhaustive
def test_a_host_that_does_not_know_the_other_ones_name(two: Hosts, folder: Path) -> None:  # H77
    two.names(two.b, other=False)
    a, b = both(two, launch(two, folder, f"launch.join_timeout_s={JOIN_S}"))
    assert (a.code, b.code) == (2, 2)
    assert "launch.rdzv_endpoint='hosta': hostb knows no machine of that name" in b.text
    assert b.seconds < JOIN_S
    assert "node 1 of 2 did not come" in a.text


@exhaustive
def test_a_host_that_does_not_know_its_own_name_trains_all_the_same(two: Hosts, folder: Path) -> None:  # H78
    two.names(two.b, own=False)
    a, b = both(two, launch(two, folder))
    assert (a.code, b.code) == (0, 0), a.text
    assert "hostb is a name for 127.0.0.1 here: GLOO_SOCKET_IFNAME=cable instead." in b.text


@exhaustive
def test_a_slow_cable_is_named_and_no_silence(two: Hosts, folder: Path) -> None:
    two.b.slow_down("256kbit")
    two.a.slow_down("256kbit")
    a, b = both(two, launch(two, folder, f"launch.node_timeout_s={SILENCE_S}", "model.out_features=4000"))
    assert (a.code, b.code) == (0, 0), a.text
    across = r"(3 \(hostb\) to rank 0 \(hosta\)|1 \(hosta\) to rank 2 \(hostb\))"
    assert re.search(f"links: 2 links are slow; the slowest, that from rank {across}", a.text), a.text
    assert "/s, less than 100 Mbit/s." in a.text


@exhaustive
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, "Interrupted by SIGINT; no rank is left."),
        (signal.SIGTERM, 75, "got SIGTERM; all ranks stopped together after step "),
    ],
)
def test_a_signal_on_one_host_ends_the_job_on_both(
    two: Hosts, folder: Path, number: signal.Signals, code: int, words: str
) -> None:
    launchers = train(two, folder)
    launchers[1].send_signal(number)
    for said in both(two, launchers):
        assert said.code == code
        assert words in said.text
        assert f"{number.name} came to the launcher on hostb." in said.text


@exhaustive
def test_a_host_that_is_stopped(two: Hosts, folder: Path) -> None:
    launchers = train(two, folder)
    launchers[1].send_signal(signal.SIGSTOP)
    said = two.finish(launchers[0])
    assert said.code == 1
    assert f"node 1 (hostb, 10.77.0.2), with ranks 2 and 3, is silent for {SILENCE_S:.0f} s" in said.text
    launchers[1].send_signal(signal.SIGCONT)
    said = two.finish(launchers[1])
    assert said.code == 1
    assert "node 0 (hosta, 10.77.0.1) is gone: its connection" in said.text


@exhaustive
@pytest.mark.parametrize("fault", ["error", "die"])
def test_a_rank_that_fails_is_told_on_both(two: Hosts, folder: Path, fault: str) -> None:
    said = both(two, launch(two, folder, f"trainer.fault={fault}", "trainer.culprit=3"))
    begin = {
        "error": "Training failed on rank 3 at step 1 in training_step (hostb, process ",
        "die": "Training failed: rank 3 (hostb, process ",
    }[fault]
    for each in said:
        assert each.code == 1
        assert begin in each.text
        assert each.text.count("Training failed") == 1
        assert "Ranks 0-2 did not fail" in each.text


@exhaustive
def test_a_restart_is_one_of_all_hosts(two: Hosts, folder: Path) -> None:
    said = both(two, launch(two, folder, "trainer.fault=die_once", "trainer.culprit=3", "launch.max_restarts=1",
                            "checkpoint.every_steps=1"))  # fmt: skip
    assert [each.code for each in said] == [0, 0], said[0].text
    assert all("Restart 1 of 1: " in each.text for each in said)


@exhaustive
@pytest.mark.parametrize("saves", [True, False])
def test_hosts_that_do_not_share_the_run_directory(two: Hosts, folder: Path, saves: bool) -> None:
    (folder / "outputs").mkdir()
    own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs outputs && exec "$@"', "sh"]
    command = [sys.executable, "-m", "safetrain", "recipe=mine", "launch=cluster", "launch.nnodes=2", two.endpoint,
               *(() if saves else (*SAVES_NOTHING, "trainer.fault=die", "trainer.culprit=3"))]  # fmt: skip
    launchers = [
        two.a.start(folder, *command, "launch.node_rank=0"),
        two.b.start(folder, *own, *command, "launch.node_rank=1"),
    ]
    a, b = both(two, launchers)
    assert "hostb can't see the run directory " in a.text
    assert (a.code, b.code) == ((2, 2) if saves else (1, 1))
    if saves:
        assert "hostb can't see the run directory " in b.text
        assert "hydra.run.dir=/shared/" in b.text
    else:
        assert "Training failed: rank 3 (hostb, process " in a.text
        assert "Training failed: rank 3 (hostb, process " in b.text
        assert "was killed by SIGKILL" in a.text


@exhaustive
def test_a_launcher_for_each_machine_of_a_slurm_job(two: Hosts, folder: Path) -> None:
    step = {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "hosta,hostb", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "safetrain", "recipe=mine", "launch=cluster", "launch.nproc_per_node=1"]
    launchers = [
        host.start(folder, *command, **step, SLURM_NODEID=str(number), SLURM_PROCID=str(number))
        for number, host in enumerate((two.a, two.b))
    ]
    a, b = both(two, launchers)
    assert (a.code, b.code) == (0, 0), a.text
    assert "2 ranks on 2 machines" in a.text
    assert "node 1 (hostb, 10.77.0.2) runs rank 1 of 2 for node 0 (hosta, 10.77.0.1)" in b.text
    assert len(list(folder.glob("outputs/*/*"))) == 1


@exhaustive
def test_each_job_of_a_sweep_is_one_of_both_hosts(two: Hosts, folder: Path) -> None:
    a, b = both(two, launch(two, folder, "optimizer.lr=0.1,0.2", "launch.nproc_per_node=1", "-m"))
    assert (a.code, b.code) == (0, 0), a.text
    lines = [said.text.splitlines()[-2:] for said in (a, b)]
    assert [line.split()[:2] for line in lines[0]] == [line.split()[:2] for line in lines[1]]  # with the same metrics
    assert "optimizer.lr=0.2" in lines[0][1]
    assert [path.name for path in sorted(folder.glob("outputs/multirun/*/?"))] == ["0", "1"]


@exhaustive
@pytest.mark.parametrize(("fault", "words"), [
    ("error", "Training failed on rank 3 at step 1 in training_step (hostb, process "),
    ("die", "Training failed: rank 3 (hostb, process "),
])  # fmt: skip
def test_under_torchrun_too_both_are_told(two: Hosts, folder: Path, fault: str, words: str) -> None:
    launchers = [
        host.start(
            folder, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"hosta:{hosts.PORT}", "-m", "safetrain", "recipe=mine",
            f"trainer.fault={fault}", "trainer.culprit=3",
        )
        for host in (two.a, two.b)
    ]  # fmt: skip
    for said in both(two, launchers):
        assert said.code == 1
        assert said.text.count(words) == 1
    assert len(list(folder.glob("outputs/*/*"))) == 1
