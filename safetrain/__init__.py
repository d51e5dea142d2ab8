"""safetrain: DDP training whose loop is safe by default.

The names below are the public ones. They load on first use: a command line that has a typo need not wait for torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetrain.comm import Comm as Comm
    from safetrain.config import Audit as Audit
    from safetrain.config import Checkpoint as Checkpoint
    from safetrain.config import Loader as Loader
    from safetrain.config import Loop as Loop
    from safetrain.config import Preflight as Preflight
    from safetrain.config import Watchdog as Watchdog
    from safetrain.contain import Loss as Loss
    from safetrain.debugger import breakpoint as breakpoint
    from safetrain.errors import CheckpointError as CheckpointError
    from safetrain.errors import CommunicationError as CommunicationError
    from safetrain.errors import ConfigError as ConfigError
    from safetrain.errors import DataError as DataError
    from safetrain.errors import PeerFailed as PeerFailed
    from safetrain.errors import PreflightError as PreflightError
    from safetrain.errors import RankFailed as RankFailed
    from safetrain.errors import RanksDiffer as RanksDiffer
    from safetrain.errors import SafetrainError as SafetrainError
    from safetrain.errors import SkipBatch as SkipBatch
    from safetrain.errors import TrainingStopped as TrainingStopped
    from safetrain.errors import UsageError as UsageError
    from safetrain.observer import Event as Event
    from safetrain.observer import Observer as Observer
    from safetrain.observer import RunInfo as RunInfo
    from safetrain.policies import Policies as Policies
    from safetrain.precision import BF16 as BF16
    from safetrain.precision import FP16 as FP16
    from safetrain.precision import FP32 as FP32
    from safetrain.report import Result as Result
    from safetrain.strategy import DDPStrategy as DDPStrategy
    from safetrain.strategy import FSDPStrategy as FSDPStrategy
    from safetrain.strategy import SingleStrategy as SingleStrategy
    from safetrain.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HERE = os.path.dirname(__file__)  # noqa: PTH120  `python -m` still has the user's folder first on the import path
if not os.path.isdir(os.path.join(_HERE, "configs")):  # noqa: PTH112, PTH118
    __path__.append(os.path.dirname(_HERE))  # noqa: PTH120  a checkout: configs/ and recipes/ lie beside this folder

_HOMES = {
    "Audit": "config",
    "BF16": "precision",
    "Checkpoint": "config",
    "CheckpointError": "errors",
    "Comm": "comm",
    "CommunicationError": "errors",
    "ConfigError": "errors",
    "DDPStrategy": "strategy",
    "DataError": "errors",
    "Event": "observer",
    "FP16": "precision",
    "FP32": "precision",
    "FSDPStrategy": "strategy",
    "Loader": "config",
    "Loop": "config",
    "Loss": "contain",
    "Observer": "observer",
    "PeerFailed": "errors",
    "Policies": "policies",
    "Preempted": "errors",
    "Preflight": "config",
    "PreflightError": "errors",
    "RankFailed": "errors",
    "RanksDiffer": "errors",
    "Result": "report",
    "RunInfo": "observer",
    "SafetrainError": "errors",
    "SingleStrategy": "strategy",
    "SkipBatch": "errors",
    "Trainer": "trainer",
    "TrainingStopped": "errors",
    "UsageError": "errors",
    "Watchdog": "config",
    "breakpoint": "debugger",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'safetrain' has no attribute {name!r}")
    return getattr(import_module(f"safetrain.{_HOMES[name]}"), name)
