"""HANGS A: ranks with different numbers of batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset

import safetrain
from safetrain.comm import Comm
from safetrain.policies import Policies, UnevenContinue, UnevenStop
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, Place, assert_clean, batches_of, end_of, feed, windows_of
from tests.ranks.toys import Batch, Classifier, adamw, assert_close, dataset, mlp, momentum_sgd, train_alone


def uneven(place: Place, few: int, many: int) -> list[list[Batch]]:
    """The culprit has ``few`` batches, the others have ``many``."""
    return batches_of(place.world_size, [few if rank == place.culprit else many for rank in range(place.world_size)])


@pytest.mark.parametrize(
    ("policy", "make_optimizer"), [(UnevenStop(), momentum_sgd), (UnevenContinue(), adamw)], ids=["stop", "continue"]
)
def test_h01_one_rank_has_fewer_batches(place: Place, policy: Any, make_optimizer: Any) -> None:
    """Reported: the bar stops at 96 % for ever. Here the epoch ends together, or goes on, exactly weighted, to the last
    batch."""
    batches = uneven(place, 3, 5)

    def work(comm: Comm) -> Ended:
        return end_of(
            Classifier(
                mlp(),
                feed(batches),
                optimizer=make_optimizer,
                policies=Policies(uneven=policy),
                loop=safetrain.Loop(epochs=2),
            )
        )

    ended = run_ranks(work, place.world_size, timeout_s=15)
    windows = windows_of(batches)[: 3 if isinstance(policy, UnevenStop) else 5] * 2
    assert_clean(ended, step=len(windows))
    assert_close(ended[0].state, run_ranks(lambda _: train_alone(mlp(), windows, make_optimizer), 1)[0])


def test_h01_datasets_drawn_without_a_shared_seed_are_refused(place: Place) -> None:
    """Reported: every process kept its own random half of the items. Here the first step is not taken: the numbers are
    told."""

    class OwnHalf(Classifier):
        def build_train_data(self) -> Dataset[Any]:
            own = random.Random(self.comm.rank)
            kept = [index for index in range(40) if own.random() < 0.5]
            return Subset(dataset(40), kept if self.comm.rank == place.culprit else kept[:12])

    def work(comm: Comm) -> Ended:
        return end_of(OwnHalf(mlp(), optimizer=momentum_sgd, loader=safetrain.Loader(batch_size=2)))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    for end in ended:
        assert end.error == "PreflightError", end
        assert f"rank {place.culprit}" in end.text
        assert "12" in end.text


@pytest.mark.parametrize(
    ("policy", "few"),
    [(UnevenStop(), 3), (UnevenContinue(), 4), (UnevenContinue(), 3)],
    ids=["stop", "continue", "continue_with_half_a_window"],
)
def test_h03_uneven_batches_with_accumulation(place: Place, policy: Any, few: int) -> None:
    """Reported: join() and no_sync() mismatch collectives. Here a window is a window, whoever has data for it."""
    batches = uneven(place, few, 8)

    def work(comm: Comm) -> Ended:
        return end_of(
            Classifier(
                mlp(),
                feed(batches),
                optimizer=momentum_sgd,
                policies=Policies(uneven=policy),
                loop=safetrain.Loop(accumulate=2, nominal_weight=4),
            )
        )

    ended = run_ranks(work, place.world_size, timeout_s=15)
    windows = windows_of(batches, 2)[: 2 if isinstance(policy, UnevenStop) else 4]
    assert_clean(ended, step=len(windows))
    assert_close(ended[0].state, run_ranks(lambda _: train_alone(mlp(), windows, momentum_sgd), 1)[0])


class Centred(nn.Module):
    """Subtracts the mean over the batches of all ranks: its forward communicates, as SyncBatchNorm's does on GPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


def centred() -> nn.Sequential:
    first, *rest = mlp()
    return nn.Sequential(first, Centred(), *rest)


class Logging(Classifier):
    """A second collective of the user's, in the step itself."""

    def training_step(self, batch: Batch) -> torch.Tensor:
        loss = super().training_step(batch)
        self.worst = self.agree(float(loss.detach()), "max")
        self.log("samples", len(batch[1]), how="sum")
        return loss


class Told:
    """An observer that keeps one metric of training."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    def start(self, run: safetrain.RunInfo) -> None: ...

    def step(self, step: int, epoch: int) -> None: ...

    def event(self, event: safetrain.Event) -> None:
        if event.kind == "train":
            self.samples.append(event.metrics["train/samples"])

    def close(self) -> None: ...


@pytest.mark.parametrize("policy", [UnevenStop(), UnevenContinue()], ids=lambda policy: type(policy).__name__)
def test_h04_uneven_batches_and_a_collective_inside_forward(place: Place, policy: Any) -> None:
    """Reported: join() does not know the collectives of forward, or of logging. Here a rank without data still takes
    part."""
    batches = uneven(place, 3, 5)

    def work(comm: Comm) -> tuple[Ended, list[float]]:
        told = Told()
        trainer = Logging(
            centred(),
            feed(batches),
            optimizer=adamw,
            policies=Policies(uneven=policy),
            strategy=safetrain.DDPStrategy(forward_communicates=True),
            loop=safetrain.Loop(log_every_steps=1),
            observers=[told],
        )
        return end_of(trainer), told.samples

    ended, told = zip(*run_ranks(work, place.world_size, timeout_s=15), strict=True)
    steps = 3 if isinstance(policy, UnevenStop) else 5
    assert_clean(ended, step=steps)
    assert_close(ended[0].state, run_ranks(lambda _: train_centred(batches, steps), 1)[0])
    seen = [4.0 * sum(step < len(mine) for mine in batches) for step in range(steps)]
    assert list(told) == [seen] * place.world_size  # a batch that is repeated to take part is not logged again


def train_centred(batches: Sequence[Sequence[Batch]], steps: int) -> dict[str, torch.Tensor]:
    """One process. A rank that is through its batches repeats its last one, for the mean alone."""
    model = mlp()
    parts = list(model.children())
    optimizer = adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        present = [mine[min(step, len(mine) - 1)] for mine in batches]
        firsts = [parts[0](x) for x, _ in present]
        mean = torch.stack([first.detach().mean(0) for first in firsts]).mean(0)
        rest = nn.Sequential(*parts[1:])
        active = [
            (F.cross_entropy(rest(first - mean), y, reduction="sum"), len(y))
            for first, (_, y), mine in zip(firsts, present, batches, strict=True)
            if step < len(mine)
        ]
        (torch.stack([loss for loss, _ in active]).sum() / sum(count for _, count in active)).backward()
        optimizer.step()
    first, *others = model
    return {name: value.detach() for name, value in nn.Sequential(first, Centred(), *others).state_dict().items()}
