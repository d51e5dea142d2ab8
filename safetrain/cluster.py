"""``launch=cluster``: which machine of the job this one is, as the command line or a scheduler says. Pure functions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from safetrain.errors import ConfigError, UsageError
from safetrain.launch_config import Launch
from safetrain.scheduler import Environment, first_host, port_of_job, tasks_of

_SAYS = "launch=cluster"
_KEYS = ("nnodes", "node_rank", "rdzv_endpoint")


@dataclass(frozen=True)
class Machines:
    """What a scheduler says about the machines of a job; ``sources`` are its variables, by key of ``launch``."""

    nnodes: int
    node_rank: int
    rdzv_endpoint: str
    nproc_per_node: int | None
    sources: Mapping[str, str]


def starts_ranks(arguments: Sequence[str], environment: Environment) -> bool:
    """Whether this command is to start ranks, though a scheduler has started it on several machines.

    Raises:
        UsageError: it is a rank of torchrun already.
    """
    asked = any(argument == _SAYS or argument.startswith("launch.nnodes=") for argument in arguments)
    if asked and "TORCHELASTIC_RUN_ID" in environment:
        raise UsageError(
            f"{_SAYS} starts ranks, and torchrun has started this process as one (RANK={environment.get('RANK')}): "
            f"leave {_SAYS} away, or run `python -m safetrain ...` without torchrun."
        )
    return asked


def with_overrides(arguments: Sequence[str], more: Sequence[str]) -> list[str]:
    """The command line with ``more`` behind its own overrides: argparse takes them in one piece only."""
    own = [index for index, argument in enumerate(arguments) if "=" in argument and not argument.startswith("-")]
    place = own[-1] + 1 if own else len(arguments)
    return [*arguments[:place], *more, *arguments[place:]]


def wants_cluster(environment: Environment) -> bool:
    """Whether Kubernetes has started one process in each pod, and wants several ranks there, or names no rank."""
    if "TORCHELASTIC_RUN_ID" in environment or "LOCAL_RANK" in environment:
        return False
    several = environment.get("PET_NPROC_PER_NODE", "1") not in ("", "1", "auto", "cpu", "gpu")
    pods, unnamed = environment.get("PET_NNODES", "1"), "RANK" not in environment
    return pods.isdecimal() and int(pods) > 1 and "PET_NODE_RANK" in environment and (several or unnamed)


@contextmanager
def folder_of_follower(arguments: Sequence[str], environment: Environment) -> Iterator[list[str]]:
    """Arguments for Hydra that keep it from making a run directory on another machine than node 0."""
    said = [argument.partition("=")[2] for argument in arguments if argument.startswith("launch.node_rank=")]
    number = said[-1] if said else ""
    if not number and _SAYS in arguments:
        with suppress(UsageError):  # told when the config is composed
            known = machines_of(environment)
            number = str(known.node_rank) if known else ""
    if number in ("", "0"):
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="safetrain_") as folder:
        yield ["hydra.output_subdir=null", f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]


def filled(launch: Mapping[str, Any], environment: Environment) -> dict[str, Any]:
    """The keys of ``launch``, with a number for each ``auto``.

    Raises:
        ConfigError: nobody says it, or a scheduler says something else than the command line.
    """
    values = dict(launch)
    if values.get("nnodes", 1) == 1:
        return values
    complete = not {values.get(key) for key in _KEYS} & {"auto", None}
    try:
        known = machines_of(environment)
    except UsageError:
        if not complete:
            raise
        known = None  # started by hand on machines that a scheduler has lent
    for key in _KEYS:
        said = None if known is None else getattr(known, key)
        if values.get(key) in ("auto", None):
            if said in (None, ""):
                raise ConfigError(
                    f"launch.{key}={values.get(key) or 'null'}: no scheduler says it here. On each machine, say "
                    "launch=cluster launch.nnodes=2 launch.node_rank=0 (1 on the second, ...) "
                    "launch.rdzv_endpoint=<machine of node 0>:29500."
                )
            values[key] = said
        elif known is not None and key != "rdzv_endpoint" and values[key] != said:
            raise ConfigError(
                f"launch.{key}={values[key]}, but {known.sources[key]}={said}: leave launch.{key} away, or start the "
                "command without that scheduler."
            )
    if known is not None and known.nproc_per_node and values.get("nproc_per_node") == "auto":
        values["nproc_per_node"] = known.nproc_per_node
    return values


def launch_said(arguments: Sequence[str], environment: Environment) -> Launch | None:
    """What a command line says about machines, where its config can't be composed; None where it is not enough."""
    said = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    values: dict[str, Any] = {key: said.get(f"launch.{key}", "auto") for key in _KEYS}
    with suppress(ConfigError, UsageError):
        values |= {key: int(values[key]) for key in ("nnodes", "node_rank") if values[key].isdecimal()}
        return Launch.parse(filled(values, environment))
    return None


def machines_of(environment: Environment) -> Machines | None:
    """What Slurm, Kubernetes or mpirun say about the machines of this job; None where none of them is there.

    Raises:
        UsageError: a scheduler has not started one launcher on each machine.
    """
    for read in (_kubernetes, _mpirun, _slurm):
        if (found := read(environment)) is not None:
            return found
    return None


def _kubernetes(environment: Environment) -> Machines | None:
    count, number = environment.get("PET_NNODES", ""), environment.get("PET_NODE_RANK", "")
    if not count.isdecimal() or not number.isdecimal():
        return None
    address = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR", "")
    port = environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT", "29500")
    per_node = environment.get("PET_NPROC_PER_NODE", "")
    return Machines(
        int(count),
        int(number),
        f"{address}:{port}" if address else "",
        int(per_node) if per_node.isdecimal() else None,
        {"nnodes": "PET_NNODES", "node_rank": "PET_NODE_RANK"},
    )


def _mpirun(environment: Environment) -> Machines | None:
    tasks = tasks_of(environment)
    if tasks is None or tasks.names[0] == "SLURM_PROCID":
        return None
    if tasks.local_count != 1:
        raise _too_many(tasks.local_count, "mpirun --map-by ppr:1:node")
    address = environment.get("MASTER_ADDR", "")
    port = environment.get("MASTER_PORT") or str(port_of_job(environment))
    rank, size = tasks.names
    return Machines(
        tasks.count, tasks.number, f"{address}:{port}" if address else "", None, {"nnodes": size, "node_rank": rank}
    )


def _slurm(environment: Environment) -> Machines | None:
    if "SLURM_JOB_ID" not in environment:
        return None
    name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environment else "SLURM_JOB_NUM_NODES"
    machines = int(environment.get(name) or 1)
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or 0)
    if machines > 1 and not tasks:
        raise UsageError(
            f"{name}={machines}, but this command runs on one of them only: start it by "
            "`srun --ntasks-per-node=1 python -m safetrain ...` in the batch script."
        )
    if tasks > machines:
        raise _too_many(tasks // machines, "srun --ntasks-per-node=1")
    return Machines(
        machines,
        int(environment.get("SLURM_NODEID") or 0),
        f"{environment.get('MASTER_ADDR') or first_host(environment)}:"
        f"{environment.get('MASTER_PORT') or port_of_job(environment)}",
        None,
        {"nnodes": name, "node_rank": "SLURM_NODEID"},
    )


def _too_many(count: int, remedy: str) -> UsageError:
    return UsageError(
        f"{_SAYS} starts all ranks of a machine, and here {count} copies of it run on one: start one on each "
        f"(`{remedy}`), or leave {_SAYS} away, and each copy is a rank."
    )
