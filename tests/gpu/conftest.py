"""One rank on one GPU; without a device these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from safetrain.comm import Comm


@pytest.fixture
def gpu() -> Iterator[Comm]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    comm = Comm.join(device="cuda")
    yield comm
    comm.leave()
