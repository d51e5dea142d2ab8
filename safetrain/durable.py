"""What is on the disk stays there, whatever becomes of the process or the machine."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

logger = logging.getLogger("safetrain")

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(path: Path, target: str) -> None:
    """Make the symbolic link ``path`` point to ``target``; at any time it points to the one or the other.

    Where the file system has no such links there is none: they are for people, nothing here relies on them.
    """
    fresh = path.with_name(f".{path.name}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        logger.info("no link %s: %s", path, error)
        return
    fresh.replace(path)
    sync(path.parent)
