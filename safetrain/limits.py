"""What this machine, or the container on it, lets a process have: cores, memory, open files, shared memory.

Each function takes the folder that it reads from, so that a test can give it another machine's.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUP, SHARED_MEMORY = Path("/proc"), Path("/sys/fs/cgroup"), Path("/dev/shm")
_NO_LIMIT = 1 << 60  # version 1 writes the largest number that its counter holds
_MEMORY = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Controller (empty: version 2), the file that holds its limit, the file that holds what is used."""


def cores(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Cores that this process may use: those it may run on, or less where a container has a quota of their time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [
        int(quota) / int(period)
        for quota, period in (
            *(text.split() for text in _texts(proc, cgroup, "", "cpu.max")),
            *zip(
                _texts(proc, cgroup, "cpu", "cpu.cfs_quota_us"),
                _texts(proc, cgroup, "cpu", "cpu.cfs_period_us"),
                strict=False,
            ),
        )
        if quota.isdigit() and int(period)  # "max" and -1: no quota
    ]
    return min([float(allowed), *quotas])


def memory_left(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that can still be had before the kernel kills something: of the machine, or of this process' container.

    What the container holds of files that it has read can be given back, and counts as left.
    """
    free = [_meminfo(proc, "MemAvailable")]
    for controller, limit, used in _MEMORY:
        for folder in _groups(proc, cgroup, controller):
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None and most < _NO_LIMIT:
                free.append(most - now + _reclaimable(folder / "memory.stat"))
    return max(0, min(free))


def memory_limit(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that all processes here may have together: the machine's memory, or less in a container."""
    limits = [_meminfo(proc, "MemTotal")]
    for controller, limit, _ in _MEMORY:
        limits += [
            most for folder in _groups(proc, cgroup, controller) if (most := _number(folder / limit)) is not None
        ]
    return min(limits)


def open_files() -> int:
    """How many files this process may have open at a time."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def free_bytes(folder: Path) -> int | None:
    """Bytes free to this user on the disk that holds ``folder``; None where that can't be known."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _meminfo(proc: Path, name: str) -> int:
    for line in _lines(proc / "meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _reclaimable(stat: Path) -> int:
    values = {words[0]: int(words[1]) for line in _lines(stat) if len(words := line.split()) == 2}
    return values.get("total_inactive_file", values.get("inactive_file", 0))


def _texts(proc: Path, cgroup: Path, controller: str, name: str) -> Iterator[str]:
    for folder in _groups(proc, cgroup, controller):
        if lines := _lines(folder / name):
            yield lines[0]


def _groups(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """The folders of this process' control group and those above it: each may hold a limit. ``controller`` is empty for
    version 2, which has one tree for all."""
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == controller or (controller and controller in controllers.split(",")):
            root = cgroup / controllers if controllers else cgroup
            if controllers and not root.is_dir():
                root = cgroup / controller
            own = root / path.lstrip("/")
            own = own if own.is_dir() else root  # in a container the path may be the host's
            return [own, *(folder for folder in own.parents if folder == root or root in folder.parents)]
    return []


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
