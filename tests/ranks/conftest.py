"""What the tests with several ranks share."""

from __future__ import annotations

import pytest
import torch._dynamo  # noqa: F401  # the first optimizer imports it: 1.5 s in every forked rank, once in their parent

from tests.ranks.outcome import Place

_PLACES = [Place(2, 0), Place(2, 1), Place(4, 0), Place(4, 3)]


@pytest.fixture(autouse=True)
def cores_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small machine is no matter here: the preflight would warn of four ranks on two cores."""
    monkeypatch.setattr("safetrain.limits.cores", lambda: 64.0)


@pytest.fixture(params=_PLACES, ids=lambda place: f"rank{place.culprit}of{place.world_size}")
def place(request: pytest.FixtureRequest) -> Place:
    """The fault on rank 0, which hosts more than the others, and on the last rank."""
    return request.param


@pytest.fixture(params=[2, 4], ids=lambda world_size: f"{world_size}ranks")
def world_size(request: pytest.FixtureRequest) -> int:
    return request.param
