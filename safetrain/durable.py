"""What is on the disk stays there, whatever becomes of the process or the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(path: Path, target: str) -> None:
    """Make the symbolic link ``path`` point to ``target``; at any time it points to the one or the other."""
    fresh = path.with_name(f".{path.name}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(path)
    sync(path.parent)
