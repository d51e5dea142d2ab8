"""What is known of environment variables: which ones matter to a job, which were renamed, which are read too early."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from safetrain.checks import kind_of
from safetrain.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
}
"""Variables of torch that once looked like NCCL's own, and what torch calls them now."""

_COMMUNICATION = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
_MATTER = frozenset({
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG", "LD_PRELOAD", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS",
    "TORCH_SHOW_CPP_STACKTRACES",
})  # fmt: skip
_SET_BY_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|SAFETRAIN)_.*"
)
_READ_AT_START = ("LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTHON")
_READ_BY_IMPORT = frozenset({"TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS"})


def matters(name: str) -> bool:
    """Whether the variable changes how ranks communicate, compute or use memory: worth being saved with a run."""
    return name in _MATTER or is_of_communication(name)


def is_of_communication(name: str) -> bool:
    """Whether the variable is one of a library that carries collectives."""
    return name.startswith(_COMMUNICATION)


def comes_too_late(name: str) -> bool:
    """Whether a process that already has torch no longer looks at the variable."""
    return name in _READ_BY_IMPORT or name.startswith(_READ_AT_START)


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Of ``names``, the variables that have another name now: ``{old: new}``."""
    return {name: RENAMED[name] for name in names if name in RENAMED}


def renaming(old: str) -> str:
    """The warning about a variable that was renamed."""
    return f"{old} is called {RENAMED[old]} now; the old name is deprecated and may be ignored. Set {RENAMED[old]}."


def check_variable(name: str, value: object) -> None:
    """``env.name=value`` can be set in the environment of a process.

    Raises:
        ConfigError: it can't, or it is not for the config to say.
    """
    key = f"env.{name}"
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ConfigError(f"{key}: an environment variable's name has letters, digits and _, and no digit first")
    if _SET_BY_LAUNCHERS.fullmatch(name):
        raise ConfigError(f"{key}: is set by what starts the ranks. See launch.* for their number and where they meet.")
    if isinstance(value, bool):
        raise ConfigError(f"{key}={str(value).lower()}: environment variables are text: write 1 or 0, or quote it")
    if value is not None and not isinstance(value, (str, int, float)):
        raise ConfigError(f"{key}={value!r}: must be text or a number, not {kind_of(value)}")
    if "\0" in str(value):
        raise ConfigError(f"{key}: the value has a NUL character in it")
