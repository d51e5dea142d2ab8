"""Environments as schedulers and launchers make them: which rank, which machine, and which do not agree."""

from __future__ import annotations

import pytest

from safetrain import comm
from safetrain.cluster import filled, folder_of_follower, starts_ranks, wants_cluster, with_overrides
from safetrain.errors import ConfigError, UsageError
from safetrain.nodelist import counts_per_node, hosts_in
from safetrain.scheduler import placement

Environment = dict[str, str]

# in a batch script: how many tasks there may be; none was started
BATCH: Environment = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0",
}  # fmt: skip


def srun(number: int, per_node: int, nodes: int = 2) -> Environment:
    """A task of a step."""
    return {
        **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": "gpu[07-08]" if nodes > 1 else "gpu07",
        "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NUM_TASKS": str(per_node * nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})", "SLURM_NTASKS": str(per_node * nodes),
        "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number % per_node), "SLURM_NODEID": str(number // per_node),
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_SRUN_COMM_HOST": "10.0.0.1", "PMI_RANK": str(number),
        "PMI_SIZE": str(per_node * nodes), "PMIX_RANK": str(number), "PMIX_NAMESPACE": "slurm.pmix.4711.0",
    }  # fmt: skip


def mpirun(number: int, per_node: int, nodes: int = 1) -> Environment:
    return {
        "OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": str(per_node * nodes),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number % per_node), "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node),
        "OMPI_COMM_WORLD_NODE_RANK": str(number % per_node), "OMPI_UNIVERSE_SIZE": str(per_node * nodes),
        "PMIX_RANK": str(number), "PMIX_NAMESPACE": "prterun-head-4242@1", "PMIX_SERVER_URI41": "prterun;tcp4://127.0.0.1:1",
    }  # fmt: skip


def torchrun(rank: int, world_size: int = 4) -> Environment:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2), "MASTER_ADDR": "gpu07", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def pod(number: int, pods: int = 2, per_pod: str = "") -> Environment:
    """Of a PyTorchJob."""
    several = int(per_pod) if per_pod.isdecimal() else 1
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "RANK": str(number), "WORLD_SIZE": str(pods * several),
        "PET_MASTER_ADDR": "train-master-0", "PET_MASTER_PORT": "23456", "PET_NNODES": str(pods),
        "PET_NODE_RANK": str(number), **({"PET_NPROC_PER_NODE": per_pod} if per_pod else {}),
    }  # fmt: skip


BY_HAND = {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}


# --- a rank ---------------------------------------------------------------------------------------------------------


def test_nobody_has_started_several() -> None:
    assert placement({}) is None
    assert placement(BATCH) is None  # the batch script itself is one process, whatever may be started from it
    assert placement(srun(0, 1, 1)) is None  # srun --pty bash
    assert placement(mpirun(0, 1)) is None


def test_each_task_of_srun_is_a_rank() -> None:
    places = [placement(srun(number, 2)) for number in range(4)]
    assert [(p.rank, p.world_size, p.local_rank, p.local_world_size) for p in places if p] == [
        (0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2),
    ]  # fmt: skip
    assert {(p.master_addr, p.master_port) for p in places if p} == {
        ("gpu07", places[0].master_port if places[0] else 0)
    }
    assert places[3] is not None
    assert places[3].source == "SLURM_PROCID, SLURM_STEP_NUM_TASKS"
    assert places[3].environment() == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(places[3].master_port),
    }  # fmt: skip


def test_machines_with_different_numbers_of_tasks() -> None:
    place = placement(
        srun(4, 2)
        | {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "4,1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    )
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (4, 5, 0, 1)


def test_the_port_is_that_of_the_job_and_an_address_that_was_set_is_taken() -> None:
    ports = {
        place.master_port
        for job, step in [("4711", "0"), ("4711", "1"), ("4712", "0")]
        if (place := placement(srun(0, 2) | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}))
    }
    assert len(ports) == 3
    assert all(20_000 <= port < 32_000 for port in ports)
    place = placement(srun(1, 2) | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"})
    assert place is not None
    assert (place.master_addr, place.master_port) == ("10.0.0.9", 1234)


def test_on_one_machine_ranks_meet_at_home() -> None:
    for environment in (srun(1, 2, 1), mpirun(1, 2)):
        place = placement(environment)
        assert place is not None
        assert (place.rank, place.world_size, place.local_rank, place.master_addr) == (1, 2, 1, "127.0.0.1")


def test_mpirun_on_several_machines_needs_an_address() -> None:
    with pytest.raises(UsageError, match=r"OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4 tell .* -x MASTER_ADDR="):
        placement(mpirun(3, 2, 2))
    place = placement(mpirun(3, 2, 2) | {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"})
    assert place is not None
    assert (place.rank, place.local_rank, place.local_world_size, place.master_addr) == (3, 1, 2, "gpu07")


def test_other_mpis() -> None:
    place = placement({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.source) == (1, 2, 1, "PMI_RANK, PMI_SIZE")


def test_an_mpi_that_does_not_say_who_is_on_which_machine_needs_an_address() -> None:
    with pytest.raises(UsageError, match="-x MASTER_ADDR="):
        placement({"PMI_RANK": "1", "PMI_SIZE": "4"})
    place = placement({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", **BY_HAND})
    assert place is not None
    assert (place.rank, place.local_rank, place.local_world_size, place.master_addr) == (3, 1, 2, "gpu07")


@pytest.mark.parametrize("said", [{"SLURM_GPUS_PER_TASK": "1"}, {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, {}])
def test_a_task_that_sees_its_own_gpu_only(monkeypatch: pytest.MonkeyPatch, said: Environment) -> None:
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda _index: None)
    if said:
        assert comm._choose_device("auto", 3).index == 0
    else:
        with pytest.raises(UsageError, match="local rank 3 has no GPU: 1 visible"):
            comm._choose_device("auto", 3)


def test_the_innermost_launcher_is_believed() -> None:
    place = placement(srun(1, 1) | torchrun(3))  # srun torchrun ...: Slurm's task 1 is an agent
    assert place is not None
    assert (place.rank, place.world_size, place.source) == (3, 4, "torchrun's RANK")
    place = placement(BATCH | torchrun(3))
    assert place is not None
    assert place.rank == 3
    # mpirun in a batch script starts its own daemons by srun, not on the machine where it runs
    place = placement(srun(0, 1) | mpirun(3, 2, 2) | {"MASTER_ADDR": "gpu07"})
    assert place is not None
    assert (place.rank, place.source) == (3, "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE")


@pytest.mark.parametrize("per_pod", ["", "1", "auto"])
def test_a_pod_of_a_pytorchjob_is_a_rank_alone_on_its_machine(per_pod: str) -> None:
    place = placement(pod(1, per_pod=per_pod))
    assert not wants_cluster(pod(1, per_pod=per_pod))
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 2, 0, 1)
    assert (place.master_addr, place.master_port) == ("train-master-0", 23456)


def test_what_was_set_by_hand_may_say_the_same_as_srun() -> None:
    place = placement(srun(3, 2) | BY_HAND | {"RANK": "3", "WORLD_SIZE": "4"})
    assert place is not None
    assert (place.rank, place.local_rank, place.local_world_size) == (3, 1, 2)
    nested = srun(1, 1) | BY_HAND | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}  # another launcher in each task
    place = placement(nested)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)


@pytest.mark.parametrize(
    ("environment", "by_hand", "message"),
    [
        (
            srun(3, 2),
            {"RANK": "0", "WORLD_SIZE": "4"},
            "RANK=0, WORLD_SIZE=4 and SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4",
        ),
        (
            srun(1, 2),
            {"RANK": "1", "WORLD_SIZE": "2"},
            "RANK=1, WORLD_SIZE=2 and SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4",
        ),
        (mpirun(1, 2), {"RANK": "0", "WORLD_SIZE": "2"}, "and OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2 say diff"),
    ],
)
def test_two_that_do_not_agree_are_both_named(environment: Environment, by_hand: Environment, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        placement(environment | BY_HAND | by_hand)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "sets RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (BY_HAND | {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        (BY_HAND | {"RANK": "two", "WORLD_SIZE": "2"}, "RANK='two': must be a whole number"),
        (BY_HAND | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
        (srun(0, 2) | {"SLURM_PROCID": ""}, "SLURM_PROCID='': must be a whole number"),
        (srun(0, 2) | {"SLURM_STEP_NODELIST": "gpu[07"}, "SLURM's list 'gpu\\[07' can't be read"),
    ],
)
def test_what_no_launcher_makes(environment: Environment, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        placement(environment)


# --- a machine ------------------------------------------------------------------------------------------------------

AUTO = {"nproc_per_node": "auto", "nnodes": "auto", "node_rank": "auto", "rdzv_endpoint": "auto"}


def test_one_task_on_each_machine_is_a_launcher() -> None:
    values = [filled(AUTO, srun(number, 1)) for number in (0, 1)]
    assert [(each["nnodes"], each["node_rank"]) for each in values] == [(2, 0), (2, 1)]
    assert values[0]["rdzv_endpoint"] == values[1]["rdzv_endpoint"]
    assert values[0]["rdzv_endpoint"].startswith("gpu07:2")


@pytest.mark.parametrize("per_pod", ["4", "1"])
def test_a_pod_with_several_ranks_is_a_machine(per_pod: str) -> None:
    environment = pod(1, per_pod=per_pod)
    assert wants_cluster(environment) == (per_pod == "4")
    assert filled(AUTO, environment) == {
        "nproc_per_node": int(per_pod), "nnodes": 2, "node_rank": 1, "rdzv_endpoint": "train-master-0:23456",
    }  # fmt: skip
    unnamed = {name: value for name, value in environment.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    assert wants_cluster(unnamed)
    assert filled(AUTO, unnamed)["rdzv_endpoint"] == "train-master-0:23456"


def test_what_the_command_line_says_stands() -> None:
    said = {**AUTO, "nnodes": 2, "node_rank": 1, "rdzv_endpoint": "a:1"}
    assert filled(said, {}) == said
    assert filled({"nnodes": 1}, srun(0, 1)) == {"nnodes": 1}
    assert filled({**said, "nproc_per_node": 3}, srun(1, 1))["nproc_per_node"] == 3
    assert filled(said, BATCH) == said  # by ssh, on machines that Slurm has lent
    with pytest.raises(ConfigError, match=r"launch\.node_rank=1, but SLURM_NODEID=0"):
        filled(said, srun(0, 1))
    with pytest.raises(ConfigError, match=r"launch\.nnodes=3, but SLURM_STEP_NUM_NODES=2"):
        filled({**AUTO, "nnodes": 3}, srun(0, 1))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "launch.nnodes=auto: no scheduler says it here"),
        (
            BATCH,
            "SLURM_JOB_NUM_NODES=2, but this command runs on one of them only: start it by `srun --ntasks-per-node=1",
        ),
        (srun(0, 2), "starts all ranks of a machine, and here 2 copies of it run on one"),
        (mpirun(0, 2, 2), "mpirun --map-by ppr:1:node"),
        (mpirun(0, 1, 2), "launch.rdzv_endpoint=auto: no scheduler says it here"),
    ],
)
def test_machines_that_nobody_can_know(environment: Environment, message: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=message):
        filled(AUTO, environment)


def test_a_rank_of_torchrun_starts_no_ranks() -> None:
    assert starts_ranks(["recipe=x", "launch=cluster"], srun(1, 1))
    assert not starts_ranks(["recipe=x"], srun(1, 1))
    with pytest.raises(UsageError, match="launch=cluster starts ranks, and torchrun has started this process as one"):
        starts_ranks(["recipe=x", "launch=cluster"], torchrun(1))


def test_only_node_0_makes_a_run_directory() -> None:
    def made(arguments: list[str], environment: Environment) -> list[str]:
        with folder_of_follower(arguments, environment) as more:
            return [argument.partition("=")[0] for argument in more]

    keys = ["hydra.output_subdir", "hydra.run.dir", "hydra.sweep.dir"]
    assert made(["launch=cluster", "launch.node_rank=0"], {}) == []
    assert made(["launch=cluster", "launch.node_rank=1"], {}) == keys
    assert made(["launch=cluster"], srun(0, 1)) == []
    assert made(["launch=cluster"], srun(1, 1)) == keys
    assert made(["recipe=x"], srun(1, 1)) == []


def test_what_is_added_to_a_command_line_stands_with_its_overrides() -> None:
    assert with_overrides(["-m", "recipe=x", "a=1", "--cfg", "job"], ["b=2"]) == [
        "-m",
        "recipe=x",
        "a=1",
        "b=2",
        "--cfg",
        "job",
    ]
    assert with_overrides(["--help"], ["b=2"]) == ["--help", "b=2"]


# --- Slurm's short forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("gpu-a[9-11],login", ["gpu-a9", "gpu-a10", "gpu-a11", "login"]),
        ("r[1-2]n[1,3].site", ["r1n1.site", "r1n3.site", "r2n1.site", "r2n3.site"]),
    ],
)
def test_names_of_machines(text: str, hosts: list[str]) -> None:
    assert hosts_in(text) == hosts


def test_counts_of_tasks() -> None:
    assert counts_per_node("2(x3),1") == [2, 2, 2, 1]
    assert counts_per_node("8") == [8]
    assert counts_per_node("") == []


@pytest.mark.parametrize("text", ["node[1-", "node[a-b]"])
def test_a_list_that_can_not_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        hosts_in(text)
