"""What a guarded script does with torch.distributed, seen from outside: how far its groups have come, and when it makes
and destroys them.

How far: each group counts what was issued on it, whoever did so. NCCL does not count send and recv, which are counted
where they go through, in ``ProcessGroup``'s methods (0.2 µs a call).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from safetrain.call_site import place_here, place_of_error
from safetrain.failure import headline
from safetrain.flight_recorder import issued_count

_SEND_AND_RECV = ("send", "recv", "recv_anysource")
_sent = 0


def progress() -> int:
    """A number that changes with each operation that this process issues on a group; any thread."""
    return issued_count() + _sent


def in_a_group() -> bool:
    """Whether this process has a default group now."""
    return dist.is_initialized()


def world_of_group() -> int:
    """How many ranks the default group has."""
    return dist.get_world_size()


def backend() -> str:
    """The default group's, such as ``gloo``."""
    return str(dist.get_backend())


def tell_of_groups(made: Callable[[], None], destroyed: Callable[[str], None], spawns: Callable[[str], None]) -> None:
    """From now on, call ``made`` after a default group is made, ``destroyed`` before it is, and ``spawns`` before the
    script starts ranks by itself; the last two with where that is, in words.
    """

    def wrapped_init(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        made()

    def wrapped_destroy(group: Any = None) -> None:
        if group in (None, dist.group.WORLD) and dist.is_initialized():
            destroyed(f"at {place_here()}{_under_way()}")
        destroy(group)

    def wrapped_start(*args: Any, **kwargs: Any) -> Any:
        spawns(f"at {place_here()}")
        return start(*args, **kwargs)

    init, destroy = dist.init_process_group, dist.destroy_process_group
    for module in (dist, dist.distributed_c10d):
        vars(module)["init_process_group"] = functools.wraps(init)(wrapped_init)
        vars(module)["destroy_process_group"] = functools.wraps(destroy)(wrapped_destroy)
    spawn_module = importlib.import_module("torch.multiprocessing.spawn")
    start = vars(spawn_module)["start_processes"]
    vars(spawn_module)["start_processes"] = functools.wraps(start)(wrapped_start)
    for name in _SEND_AND_RECV:
        setattr(dist.ProcessGroup, name, _counting(getattr(dist.ProcessGroup, name)))


def _under_way() -> str:
    """The exception that is on its way through the caller, in words."""
    error = sys.exc_info()[1]
    if error is None:
        return ""
    place = place_of_error(error)
    return f" after {type(error).__name__}: {headline(str(error))}" + (f" ({place})" if place else "")


def _counting(method: Any) -> Any:
    @functools.wraps(method)
    def counting(*args: Any, **kwargs: Any) -> Any:
        global _sent
        _sent += 1
        return method(*args, **kwargs)

    return counting
