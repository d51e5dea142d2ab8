"""A user's project for each test; none may leave a rank running."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Fails a test that leaves a rank running."""
    project = Project.create(tmp_path)
    yield project
    for process in project.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    left = [] if project.gone() else project.ranks()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"ranks left running: {left}"
