"""One rank on one GPU; without a device these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from safetrain.comm import Comm


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Comm]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    comm = Comm.join(device="cuda")
    yield comm
    comm.leave()
