"""HANGS B, G: evaluation on one rank, and forwards that communicate."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import safetrain
from safetrain.comm import Comm
from safetrain.testing import RankError, run_ranks
from tests.ranks.outcome import (
    Ended,
    Place,
    assert_all_stopped,
    assert_clean,
    batches_of,
    end_of,
    feed,
    train_like_ddp,
    windows_of,
)
from tests.ranks.toys import (
    Batch,
    Classifier,
    adamw,
    assert_close,
    mlp,
    momentum_sgd,
    samples,
    train_alone,
)


def test_h12_one_rank_alone_evaluates(place: Place) -> None:
    """Reported: a barrier after rank 0's validation never returns, as DDP's forward broadcasts buffers. Here
    ``self.model`` is the bare model: a rank may call it whenever it likes, and training does not notice."""
    batches = batches_of(place.world_size, 4)

    class Looks(Classifier):
        def look(self) -> None:
            if self.comm.rank == place.culprit:
                self.model.eval()
                with torch.no_grad():
                    self.seen = float(self.model(samples(5)[0]).sum())
                self.model.train()

        def on_epoch_start(self) -> None:
            self.look()

        def training_step(self, batch: Batch) -> torch.Tensor:
            self.look()
            loss = super().training_step(batch)
            self.look()
            return loss

    def work(comm: Comm) -> Ended:
        return end_of(Looks(with_norm(), feed(batches), optimizer=adamw))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean([without_buffers(end) for end in ended], step=4)
    expected = run_ranks(lambda _: train_like_ddp(with_norm(), windows_of(batches), adamw), 1)[0]
    assert_close(ended[0].state, expected)


def with_norm() -> nn.Sequential:
    first, second, *rest = mlp()
    return nn.Sequential(first, second, nn.BatchNorm1d(16), *rest)


def without_buffers(end: Ended) -> Ended:
    return Ended(**{**vars(end), "state": {name: v for name, v in end.state.items() if "running" not in name}})


def test_h22_a_layer_with_a_collective_is_skipped_on_one_rank(place: Place) -> None:
    """Reported: ranks hang in SyncBatchNorm that took different branches. Nothing can pair such a call; the limit of
    its group ends all ranks, the waiting ones with the line of the layer (who is missing is for the watchdog to
    say)."""
    batches = batches_of(place.world_size, 4)

    def work(comm: Comm) -> Ended:
        group = dist.new_group(timeout=timedelta(seconds=1.5))

        class Skips(Classifier):
            def training_step(self, batch: Batch) -> torch.Tensor:
                loss = super().training_step(batch)
                if not (self.comm.rank == place.culprit and self.step == 2):
                    dist.all_reduce(torch.ones(3), group=group)  # the line that waits
                return loss

        return end_of(Skips(mlp(), feed(batches), optimizer=momentum_sgd))

    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(work, place.world_size, timeout_s=20)
    assert time.monotonic() - started < 15
    errors = caught.value.errors
    assert sorted(errors) == list(range(place.world_size))
    for rank, text in errors.items():
        assert "still running" not in text
        if rank != place.culprit:
            assert "dist.all_reduce(torch.ones(3), group=group)  # the line that waits" in text


class SyncNorm(nn.Module):
    """A stand-in for SyncBatchNorm, which needs GPUs: forward averages over ranks, and divides by the local count."""

    running: torch.Tensor

    def __init__(self, *, in_eval: bool) -> None:
        super().__init__()
        self.in_eval = in_eval
        self.register_buffer("running", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and not self.in_eval:
            return x - self.running
        mean = x.detach().sum(0) / len(x)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if self.training:
            self.running = 0.9 * self.running + 0.1 * mean
        return x - mean


def synced(*, in_eval: bool = False) -> nn.Sequential:
    first, *rest = mlp()
    return nn.Sequential(first, SyncNorm(in_eval=in_eval), *rest)


communicates = safetrain.DDPStrategy(forward_communicates=True)


def test_h57_an_empty_batch_on_one_rank(place: Place) -> None:
    """Reported: a rank without boxes breaks SyncBatchNorm. Without one, an empty batch adds nothing, and the rest is
    exact."""
    batches = batches_of(place.world_size, 4)
    batches[place.culprit][0] = samples(0)
    batches[place.culprit][2] = samples(0)

    def work(comm: Comm) -> Ended:
        return end_of(Classifier(mlp(), feed(batches), optimizer=adamw, loop=safetrain.Loop(nominal_weight=4)))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean(ended, step=4)
    expected = run_ranks(lambda _: train_alone(mlp(), windows_of(batches), adamw), 1)[0]
    assert_close(ended[0].state, expected)


def test_h57_an_empty_batch_where_forward_communicates(place: Place) -> None:
    """With a layer that syncs, a rank with an empty batch repeats its last good one, with weight 0, to stay in step."""
    batches = batches_of(place.world_size, 4)
    batches[place.culprit][2] = samples(0)

    def work(comm: Comm) -> Ended:
        loop = safetrain.Loop(nominal_weight=4)
        return end_of(Classifier(synced(), feed(batches), optimizer=adamw, strategy=communicates, loop=loop))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean(ended, step=4)
    expected = run_ranks(lambda _: train_synced(batches), 1)[0]
    assert_close(ended[0].state, expected)


def train_synced(batches: list[list[Batch]]) -> dict[str, torch.Tensor]:
    """One process; a rank with an empty batch shows its last good one for the mean, and adds no loss."""
    model = synced()
    norm: Any = model[1]
    before, after = model[:1], model[2:]
    optimizer = adamw(model.parameters())
    shown = [mine[0] for mine in batches]
    for step in range(len(batches[0])):
        present = [mine[step] for mine in batches]
        shown = [batch if len(batch[1]) else last for batch, last in zip(present, shown, strict=True)]
        optimizer.zero_grad()
        mean = torch.stack([before(x).detach().mean(0) for x, _ in shown]).mean(0)
        norm.running = 0.9 * norm.running + 0.1 * mean
        losses = [F.cross_entropy(after(before(x) - mean), y, reduction="sum") for x, y in present if len(y)]
        (torch.stack(losses).sum() / sum(len(y) for _, y in present)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def test_h57_a_batch_that_one_rank_refuses_where_forward_communicates(place: Place) -> None:
    """All ranks drop that window before its forward, and the statistics of the windows before it stay as they were."""
    batches = batches_of(place.world_size, 4)

    class Refuses(Classifier):
        def accept_batch(self, batch: Batch) -> bool:
            return not (self.comm.rank == place.culprit and self.step == 2)

    def work(comm: Comm) -> Ended:
        return end_of(Refuses(synced(), feed(batches), optimizer=adamw, strategy=communicates))

    ended = run_ranks(work, place.world_size, timeout_s=15)
    assert_clean(ended, step=4, applied_steps=3)
    kept = [[batch for step, batch in enumerate(mine) if step != 2] for mine in batches]
    assert_close(ended[0].state, run_ranks(lambda _: train_synced(kept), 1)[0])


def test_h57_no_data_at_all_for_a_first_forward_that_communicates(place: Place) -> None:
    """A rank that has nothing to take part with yet: all ranks stop before the forward that would hang, and name it."""
    batches = batches_of(place.world_size, 2)
    batches[place.culprit][0] = samples(0)

    def work(comm: Comm) -> Ended:
        return end_of(Classifier(synced(), feed(batches), optimizer=adamw, strategy=communicates))

    assert_all_stopped(run_ranks(work, place.world_size, timeout_s=15), place, 0, "no data for its first window")


def test_h58_a_layer_that_syncs_in_evaluation_too(place: Place) -> None:
    """Reported: rank 0's validation hangs in a norm without running statistics. Here ranks whose validation data is of
    different length still make equally many forwards, and each sample counts once."""
    batches = batches_of(place.world_size, 2)
    counts = [1 if rank == place.culprit else 3 for rank in range(place.world_size)]
    validation = batches_of(place.world_size, counts, size=2)

    def work(comm: Comm) -> Ended:
        trainer = Counts(
            synced(in_eval=True), feed(batches), feed(validation), optimizer=momentum_sgd, strategy=communicates
        )
        return end_of(trainer)

    ended = run_ranks(work, place.world_size, timeout_s=10)
    assert_clean(ended, step=2)
    assert [end.metrics["val/samples"] for end in ended] == [2 * sum(counts)] * place.world_size


class Counts(Classifier):
    def validation_step(self, batch: Batch) -> None:
        super().validation_step(batch)
        self.log("samples", len(batch[1]), how="sum")
