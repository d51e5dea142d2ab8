"""When ranks fail together, the state of the last whole step is saved, and a new process goes on from there: as the run
that did not fail would have gone on, to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import safetrain
from safetrain.comm import Comm
from safetrain.precision import FP16
from safetrain.testing import differences, run_ranks
from tests.ranks.resuming import At, Setting, assert_exact, cut_and_resumed, straight

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_raises_in_its_step(culprit: int) -> None:
    assert_exact(Setting(rescued=True), [At(8, rank=culprit), At(13, rank=culprit)], 2)


@pytest.mark.parametrize("culprit", [0, 3])
def test_one_of_four_raises(culprit: int) -> None:
    """Above two ranks a new process adds up its first gradients in another order, so the last bits may differ."""
    setting = Setting(epoch_samples=46 * 4, rescued=True)

    def work(comm: Comm) -> None:
        expected, whole = straight(setting, comm)
        found, history = cut_and_resumed(setting, comm, [At(8, rank=culprit), At(13, rank=culprit)])
        assert history.seen == whole.seen
        assert not differences(found["own"], expected["own"])
        for name, value in expected["shared"]["model"].items():
            torch.testing.assert_close(found["shared"]["model"][name], value, rtol=1e-5, atol=1e-6)

    run_ranks(work, 4, timeout_s=100)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(accumulate=3, rescued=True),
        Setting(workers=2, rescued=True),
        Setting(precision=FP16, rescued=True),
        Setting(given={"strategy": safetrain.DDPStrategy(broadcast_buffers=False)}, rescued=True),
        Setting(given={"optimizer": partial(torch.optim.AdamW, lr=0.01), "scheduler": None}, rescued=True),
    ],
    ids=["accumulation", "workers", "fp16", "own_buffers", "adamw"],
)
def test_whatever_the_run_has(setting: Setting) -> None:
    micro = setting.accumulate - 1
    assert_exact(setting, [At(1, micro, rank=1), At(2, micro, rank=0)], 2)


@pytest.mark.parametrize("culprit", [0, 1])
def test_in_the_first_window_of_a_run_and_of_an_epoch(culprit: int) -> None:
    assert_exact(Setting(rescued=True), [At(0, rank=culprit), At(12, rank=culprit)], 2)


@pytest.mark.parametrize("culprit", [0, 1])
def test_in_a_validation_which_is_then_run_again(culprit: int) -> None:
    assert_exact(Setting(rescued=True), [At(12, validation=True, rank=culprit)], 2)
