"""What is known of environment variables."""

from __future__ import annotations

import pytest

from safetrain.variables import RENAMED, comes_too_late, is_of_communication, matters, renamed, renaming


def test_a_variable_that_was_renamed_is_told_with_the_right_name() -> None:
    found = renamed(["PATH", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT"])
    assert found == {"NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT"}
    assert renaming("NCCL_BLOCKING_WAIT").endswith("Set TORCH_NCCL_BLOCKING_WAIT.")


def test_torch_put_its_own_name_before_each() -> None:
    assert [new for old, new in RENAMED.items() if new != f"TORCH_{old}"] == []


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"])
def test_what_matters_is_known(name: str) -> None:
    assert matters(name)


@pytest.mark.parametrize("name", ["PATH", "HOME", "RANK", "AWS_SECRET_ACCESS_KEY", "MY_NCCL_DEBUG"])
def test_what_does_not_matter_is_not_saved(name: str) -> None:
    assert not matters(name)
    assert not is_of_communication(name)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "LD_PRELOAD", "TORCH_CPP_LOG_LEVEL"])
def test_what_a_started_process_does_not_read_any_more(name: str) -> None:
    assert comes_too_late(name)
    assert not comes_too_late("NCCL_DEBUG")
