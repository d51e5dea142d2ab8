"""Every test leaves the process as it found it: environment, current folder, threads, child processes."""

from __future__ import annotations

import os

# torch's store asks the name server who each of its clients is. An answer that is lost would hold a test up for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

# a shared machine may take any time over an example
hypothesis.settings.register_profile("safetrain", deadline=None, max_examples=50)
hypothesis.settings.load_profile("safetrain")

_SETTLE_S = 5.0  # threads and processes that are on their way out may take this long on a loaded machine
# scikit-learn and torch set such variables when they are first needed, safetrain the last when ranks are joined
_SET_BY_IMPORTS = ("KMP_", "TORCHINDUCTOR_", "TORCH_FR_")
_LASTING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # Python keeps them until it ends


_WITH_PROCESSES = ("tests/ranks/", "tests/launch/", "tests/faults/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a matrix of cases that start processes, the everyday run takes as few as show each value of each parameter;
    the others are exhaustive."""
    matrices: dict[str, dict[pytest.Item, set[tuple[str, str]]]] = defaultdict(dict)
    for item in items:
        case = getattr(item, "callspec", None)
        if case is None or not item.nodeid.startswith(_WITH_PROCESSES) or item.get_closest_marker("exhaustive"):
            continue
        matrices[item.nodeid.partition("[")[0]][item] = _shows(case.params)
    for cases in matrices.values():
        missing: set[tuple[str, str]] = set().union(*cases.values())
        while missing:
            missing -= cases.pop(max(cases, key=lambda item: len(cases[item] & missing)))
        for item in cases:
            item.add_marker(pytest.mark.exhaustive)


def _shows(params: Mapping[str, object]) -> set[tuple[str, str]]:
    """What a case shows of each parameter; of a fault's place the number of ranks, and whether it is on the first or
    the last of them."""
    values = dict(params)
    if (place := values.pop("place", None)) is not None:
        values |= {"world_size": getattr(place, "world_size", None), "culprit": getattr(place, "culprit", None)}
    if "culprit" in values:
        values["culprit"] = "the first" if values["culprit"] == 0 else "the last"
    return {(name, repr(value)) for name, value in values.items()}


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaks an environment variable, a changed current folder, a thread or a child process."""
    environment, folder = _environment(), Path.cwd()
    threads, children = set(threading.enumerate()), set(_children())
    yield
    changed = {name for name, _ in environment.items() ^ _environment().items()}
    assert not changed, f"environment variables left changed: {sorted(changed)}"
    assert Path.cwd() == folder, f"the current folder was left at {Path.cwd()}"
    deadline = time.monotonic() + _SETTLE_S
    while (left := _left(threads, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left running: {left}"


def _environment() -> dict[str, str]:
    ignored = ("PYTEST_CURRENT_TEST", *_SET_BY_IMPORTS)
    return {name: value for name, value in os.environ.items() if not name.startswith(ignored)}


def _left(threads: set[threading.Thread], children: set[int]) -> list[str]:
    new_threads = [thread.name for thread in threading.enumerate() if thread not in threads]
    new_children = {pid: command_of(pid) for pid in set(_children()) - children}
    lasting = {pid for pid, command in new_children.items() if any(name in command for name in _LASTING)}
    return [*new_threads, *(f"process {pid}: {command}" for pid, command in new_children.items() if pid not in lasting)]


def _children() -> list[int]:
    tasks = Path("/proc/self/task")
    found: list[int] = []
    for task in tasks.iterdir() if tasks.exists() else ():
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
