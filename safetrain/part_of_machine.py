"""Jobs at once on one machine: each gets its part of the GPUs and of the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from safetrain.environ import environment
from safetrain.errors import ConfigError
from safetrain.sweep import Folder

_GPUS, _THREADS, _OMP = "CUDA_VISIBLE_DEVICES", "_NUM_THREADS", "OMP_NUM_THREADS"


def number_at_once(asked: int) -> int:
    """How many jobs joblib runs at once for ``hydra.launcher.n_jobs``; -1 is one a core, -2 one less."""
    return asked if asked > 0 else max(1, number_of_cores() + 1 + asked)


def number_of_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_user() -> dict[str, str]:
    """``OMP_NUM_THREADS`` and the like, as the shell has them; taken in the command's own process."""
    return {name: value for name, value in os.environ.items() if name.endswith(_THREADS)}


def forget_threads_of_engine(users: Mapping[str, str]) -> None:
    """Undo what an engine has set for jobs of one process: with it, each *rank* would have all cores of its job."""
    for name in [name for name in os.environ if name.endswith(_THREADS) and name not in users]:
        del os.environ[name]


@contextmanager
def part_of_gpus(folder: Folder, at_once: int, gpus: Sequence[str]) -> Iterator[None]:
    """See only the GPUs of a part that no other job of the sweep has now; ``gpus``: the ids of all of them.

    Raises:
        ConfigError: there are fewer GPUs than jobs at once.
    """
    if not gpus or at_once == 1:
        yield
        return
    if at_once > len(gpus):
        raise ConfigError(
            f"hydra.launcher.n_jobs: {at_once} jobs at once on {len(gpus)} GPUs; each rank needs one of its own. "
            f"Allowed here: 1-{len(gpus)}; any number with device=cpu."
        )
    for part in range(at_once):
        with folder.held(f"part_{part}", wait=False) as got:
            if got:
                with environment({_GPUS: ",".join(share(gpus, part, at_once))}):
                    yield
                return
    raise ConfigError(f"more than hydra.launcher.n_jobs={at_once} jobs run at once: no GPU is left for this one")


def share(gpus: Sequence[str], part: int, parts: int) -> Sequence[str]:
    """Neighbours stay together; what does not divide evenly is left unused."""
    each = len(gpus) // parts
    return gpus[part * each : (part + 1) * each]


def visible_gpus(count: int) -> list[str]:
    """The ids of the ``count`` GPUs that torch sees, as ``CUDA_VISIBLE_DEVICES`` has them."""
    said = [name.strip() for name in os.environ.get(_GPUS, "").split(",") if name.strip()]
    return said[:count] or [str(index) for index in range(count)]


def threads_of_rank(cores: int | None, ranks: int) -> dict[str, str]:
    """The environment that gives each of ``ranks`` its share of the job's ``cores``; what the user said stays."""
    return {} if cores is None or _OMP in os.environ else {_OMP: str(max(1, cores // ranks))}
