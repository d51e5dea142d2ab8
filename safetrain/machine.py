"""Which machine this is: a name for people, and an identity to compare, since pods and containers can share a name."""

from __future__ import annotations

import functools
import os
import socket
from contextlib import suppress
from pathlib import Path


def host() -> str:
    """The machine's name."""
    return socket.gethostname()


@functools.cache
def identity() -> str:
    """Equal for two processes that see each other's process ids: same name, same boot, same process namespace."""
    facts = [host()]
    with suppress(OSError):  # no Linux
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        facts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  it names no file
    return "/".join(facts)
