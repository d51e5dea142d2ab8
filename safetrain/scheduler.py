"""What the environment of a scheduler, or of another launcher, says about this process: its rank. Pure functions.

torchrun's variables are the ones that all of torch knows, so what others say is put into these. The innermost launcher
is believed: torchrun before mpirun, mpirun before srun, which may have started the other one. What was set by hand has
to agree with what started the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safetrain.errors import UsageError
from safetrain.nodelist import counts_per_node, hosts_in

Environment = Mapping[str, str]

_BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NOT_SAID = 0
_FIRST_PORT, _PORTS = 20_000, 12_000  # below the ports that Linux gives to whoever asks for any


@dataclass(frozen=True)
class Placement:
    """One rank among the ranks. ``source``: the variables that say so."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    source: str

    def environment(self) -> dict[str, str]:
        """The same as torchrun would say it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True)
class Tasks:
    """How many copies of this command a scheduler has started, and which one this is."""

    number: int
    count: int
    local_number: int
    local_count: int
    names: tuple[str, str]

    def __str__(self) -> str:
        return f"{self.names[0]}={self.number}, {self.names[1]}={self.count}"


def placement(environment: Environment) -> Placement | None:
    """This process' rank; None where nobody has started it as one of several.

    Raises:
        UsageError: the environment is incomplete, or two that set it do not agree.
    """
    tasks = tasks_of(environment)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _set_before(environment, tasks)
    if tasks is None:
        return None
    address, port = _address(environment, tasks)
    local_count = tasks.count if tasks.local_count == _NOT_SAID else tasks.local_count
    return Placement(tasks.number, tasks.count, tasks.local_number, local_count, address, port, ", ".join(tasks.names))


def has_a_gpu_of_its_own(environment: Environment) -> bool:
    """Whether Slurm lets this task see its own GPU only, so that its number is 0 whatever its local rank is."""
    per_task = environment.get("SLURM_TRES_PER_TASK", "")
    return environment.get("SLURM_GPUS_PER_TASK", "") == "1" or per_task.endswith(("gpu=1", "gpu:1"))


def tasks_of(environment: Environment) -> Tasks | None:
    """The several copies that mpirun or srun has started; None where there is one only.

    Slurm tells a batch script how many tasks it may start: only in a step, which srun makes, they have been started.
    """
    mpi = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    )
    if "PMI_LOCAL_SIZE" in environment:
        mpi = (mpi[0], ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"))  # Cray
    srun = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    for rank, size, local_rank, local_size in (*mpi, srun):
        if rank == "PMI_RANK" and "SLURM_STEP_NUM_TASKS" in environment:
            continue  # srun says the same, and more
        count = _number(environment, size, 1)
        if count == 1:
            continue
        if local_size == srun[-1]:
            per_node = counts_per_node(environment.get(local_size, ""))
            node = _number(environment, "SLURM_NODEID", 0)
            local_count = per_node[node] if node < len(per_node) else count
        else:
            local_count = _number(environment, local_size, _NOT_SAID)
        number = _number(environment, rank)
        return Tasks(number, count, _number(environment, local_rank, number), local_count, (rank, size))
    return None


def _set_before(environment: Environment, tasks: Tasks | None) -> Placement:
    """Where RANK is there already: by torchrun, by Kubernetes, or by hand."""
    present = [name for name in _BY_HAND if name in environment]
    missing = [name for name in _BY_HAND if name not in environment]
    if missing:
        raise UsageError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}: the ranks were started by hand "
            "and incompletely. Start them with `python -m safetrain` or torchrun, or unset these variables to run one "
            "process."
        )
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}: one of them is wrong. Let a launcher set them."
        )
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    pod = "PET_NODE_RANK" in environment or "PET_MASTER_ADDR" in environment  # one rank, alone with its GPU
    local_rank, local_world_size = (0, 1) if pod and not by_torchrun else (rank, world_size)
    if tasks is not None and not by_torchrun:
        local_rank, local_world_size = tasks.local_number, tasks.local_count
        nested = world_size > tasks.count and "LOCAL_RANK" in environment  # each task has started ranks of its own
        if (rank, world_size) != (tasks.number, tasks.count) and not nested:
            raise UsageError(
                f"RANK={rank}, WORLD_SIZE={world_size} and {tasks} say different things about this process. Unset RANK "
                f"and WORLD_SIZE ({tasks.names[0]} is enough), or start one task on each machine and let torchrun or "
                "launch=cluster start the ranks there."
            )
    return Placement(
        rank,
        world_size,
        _number(environment, "LOCAL_RANK", local_rank),
        _number(environment, "LOCAL_WORLD_SIZE", local_world_size),
        environment["MASTER_ADDR"],
        _port(environment["MASTER_PORT"]),
        "torchrun's RANK" if by_torchrun else "RANK, WORLD_SIZE",
    )


def _address(environment: Environment, tasks: Tasks) -> tuple[str, int]:
    """Where ranks meet: what was set by hand, else rank 0's machine and a port that the job's number tells."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not address and tasks.local_count == tasks.count:
        address = "127.0.0.1"
    if not address and tasks.names[0] == "SLURM_PROCID":
        address = first_host(environment)
    if not address:
        raise UsageError(
            f"{tasks} tell who this process is, but not where rank 0 runs: say it, on all machines, as in "
            "`mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...`."
        )
    return address, _port(port) if port else port_of_job(environment)


def first_host(environment: Environment) -> str:
    """The first machine of a Slurm step, where rank 0 runs; empty where none is named."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return next(iter(hosts_in(nodes)), "")


def port_of_job(environment: Environment) -> int:
    """The same on all machines of a job, and another one for the next job."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID")
    text = "/".join(environment.get(name, "") for name in names)
    number = 0
    for character in text.encode():
        number = (number * 257 + character) % _PORTS
    return _FIRST_PORT + number


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"MASTER_PORT={text!r}: must be a whole number, 1-65535")
    return int(text)


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: must be a whole number. It is the launcher's to set.")
    return int(text)
