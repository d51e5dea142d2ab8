"""What benchmarks.start_and_leave has safetrain's own launcher run: the same training as the scripts of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

import safetrain
from benchmarks.start_and_leave import STEPS, WORK, tell_memory, tell_step
from benchmarks.workloads import WORKLOADS


def data() -> Dataset[Any]:
    return WORKLOADS[WORK].build_data(STEPS)


class OneMLP(safetrain.Trainer):
    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        if self.step in (0, STEPS - 1):
            tell_step()
        return WORKLOADS[WORK].loss(self.model, *batch)

    def extra_state(self) -> dict[str, Any]:
        """Asked for at the last save, after which nothing grows."""
        if self.step == STEPS:
            tell_memory()
        return {}
