"""The last collectives of this process, from torch's flight recorder: the one door to what torch keeps private there.

Seen on torch 2.13 (``tests/ranks/test_flight_recorder.py`` tells when another one differs): Gloo records collectives,
not send and recv; the state is always "scheduled", so ``retired`` says whether one is over; stacks are left out, since
the first dump with them imports torch._inductor (seconds). A dump without them takes 0.2 ms.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

_SIZE, _ENTRIES = "TORCH_FR_BUFFER_SIZE", "2000"


@dataclass(frozen=True)
class Collective:
    """One collective that this process issued.

    Attributes:
        group: the group's name, the same on all its ranks; ``about`` is what it was described as.
        members: the ranks of the group; empty: all of them (a thousand names in each record would be megabytes), or
            not known.
        number: of the group's collectives, counted from 1.
        shapes: of its inputs; dtype: of the first one.
        done: it is over on this rank, well or not.
        issued_ns, ended_ns: since the epoch, by the machine's clock; None where not known. Gloo tells no end, NCCL's is
            when torch noticed it.
        timeout_s: after which it fails by itself.
    """

    group: str
    about: str
    members: tuple[int, ...]
    number: int
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    done: bool
    issued_ns: int | None = field(default=None, compare=False)
    ended_ns: int | None = field(default=None, compare=False)
    timeout_s: float | None = field(default=None, compare=False)


def switch_on() -> None:
    """Have torch record collectives; call it before the first group is made. What the user has set stands."""
    os.environ.setdefault(_SIZE, _ENTRIES)


def last_collectives(per_group: int = 6) -> list[Collective]:
    """The last collectives of each group, oldest first, and all that are not over."""
    world = dist.distributed_c10d._world
    everyone = max(map(len, world.pg_group_ranks.values()), default=0)
    members = {
        str(world.pg_names[group]): tuple(sorted(ranks)) if len(ranks) < everyone else ()
        for group, ranks in world.pg_group_ranks.items()
    }
    found: dict[str, list[Collective]] = {}
    for dump in _dumps():
        for entry in pickle.loads(dump).get("entries", ()):
            if not entry["is_p2p"]:
                one = _collective(entry, members)
                found.setdefault(one.group, []).append(one)
    last = [one for calls in found.values() for one in calls[-per_group:]]
    return [one for calls in found.values() for one in calls[:-per_group] if not one.done] + last


def issued_count() -> int:
    """How many operations this process has issued on all its groups, however (also DDP's, in C++); 1 µs, any thread.

    It may fall where a group is destroyed. NCCL does not count send and recv here, and others than Gloo, NCCL, XCCL and
    UCC count nothing.
    """
    return sum(_issued_on(group) for group in list(dist.distributed_c10d._world.pg_map))


def _issued_on(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def _dumps() -> list[bytes]:
    options = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
    names = ("_dump_fr_trace", "_dump_nccl_trace")  # the second in a CUDA build: NCCL has a recorder of its own
    return [getattr(c10d, name)(**options) for name in names if hasattr(c10d, name)]


def _collective(entry: Mapping[str, Any], members: Mapping[str, tuple[int, ...]]) -> Collective:
    group, about = entry["process_group"]
    return Collective(
        group=group,
        about=about,
        members=members.get(group, ()),
        number=entry["collective_seq_id"],
        op=entry["profiling_name"].partition(":")[2],
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        dtype=next(iter(entry["input_dtypes"]), ""),
        done=entry["retired"],
        issued_ns=entry.get("time_created_ns"),
        ended_ns=entry.get("time_discovered_completed_ns"),
        timeout_s=entry["timeout_ms"] / 1000 if "timeout_ms" in entry else None,
    )
