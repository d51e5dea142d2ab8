"""A run that is cut and resumed is the run that was not: weights, optimizer, batches, logged metrics, bit for bit."""

from __future__ import annotations

import pytest

from safetrain.precision import FP16, FP32, Precision
from tests.ranks.resuming import At, Setting, assert_exact

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", [FP32, FP16])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_h55_h88_cut_inside_an_epoch(
    world_size: int, precision: type[Precision], workers: int, accumulate: int
) -> None:
    """Reported: batches repeated or left out after a resume (H88), and a loss scale that began anew (H55). Here the
    samples are the same, and so are the scale and its growth tracker, which are a part of the state."""
    setting = Setting(accumulate=accumulate, workers=workers, precision=precision)
    assert_exact(setting, [At(8, micro=accumulate - 1)], world_size)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "cuts",
    [
        [At(1)],  # before the first checkpoint
        [At(12)],  # in the first window after an epoch
        [At(12, validation=True)],  # at the end of the first epoch of two ranks
        [At(3), At(3), At(4)],  # in the window after a checkpoint
        [At(2), At(7), At(14), At(20), At(23)],
    ],
    ids=["at_the_start", "at_an_epochs_end", "in_validation", "at_a_checkpoint", "five_times"],
)
def test_h88_cut_anywhere(world_size: int, cuts: list[At]) -> None:
    assert_exact(Setting(epoch_samples=92 // 2 * world_size), cuts, world_size)
