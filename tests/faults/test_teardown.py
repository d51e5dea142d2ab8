"""A clean-up that waits for the other ranks, in user code, does not hang: all ranks come to it together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from safetrain import Comm, Loader, Loop, PeerFailed, RankFailed, Trainer
from safetrain.testing import run_ranks


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 64)


class Fails(Trainer):
    culprit = 0

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.step == 2 and self.comm.rank == self.culprit:
            raise ValueError("bad label 12")
        return self.model(batch).square().mean()


def _train_and_tidy_up(comm: Comm, culprit: int) -> tuple[str, int]:
    trainer = Fails(
        torch.nn.Linear(4, 2),
        Numbers(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loop=Loop(epochs=1),
        loader=Loader(batch_size=4),
        device="cpu",
    )
    trainer.culprit = culprit
    said: Any = None
    try:
        trainer.fit()
    except (RankFailed, PeerFailed) as error:
        said = error
    finally:
        comm.barrier()
        torch.distributed.destroy_process_group()
    return type(said).__name__, said.step


@pytest.mark.parametrize(("ranks", "culprit"), [(2, 0), (2, 1), (4, 3)])
def test_h32_a_barrier_and_destroy_in_finally(ranks: int, culprit: int) -> None:
    said = run_ranks(_train_and_tidy_up, ranks, culprit, timeout_s=40)
    assert said == [("RankFailed" if rank == culprit else "PeerFailed", 2) for rank in range(ranks)]
