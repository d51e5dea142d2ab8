"""HANGS E: parameters that get a gradient twice, or in turns; and static graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import safetrain
from safetrain.comm import Comm
from safetrain.testing import run_ranks
from tests.ranks.outcome import Ended, assert_clean, batches_of, end_of, feed, windows_of
from tests.ranks.toys import CLASSES, FEATURES, Batch, Classifier, adamw, assert_close, mlp, momentum_sgd, train_alone


class Recurrent(nn.Module):
    """One Linear used twice, each time behind a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.body, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.clone().requires_grad_()  # a reentrant checkpoint needs an input with a gradient
        for _ in range(2):
            hidden = checkpoint(lambda value: self.body(value).tanh(), hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


def test_h42_a_shared_layer_behind_two_checkpoints(world_size: int) -> None:
    """Reported: "marked as ready twice". With ``use_reentrant=False`` it is an ordinary model, and trains as one."""
    batches = batches_of(world_size, 3)

    def work(comm: Comm) -> Ended:
        return end_of(Classifier(Recurrent(reentrant=False), feed(batches), optimizer=adamw))

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=3)
    expected = run_ranks(lambda _: train_alone(Recurrent(reentrant=False), windows_of(batches), adamw), 1)[0]
    assert_close(ended[0].state, expected)


def test_h42_reentrant_checkpoints_over_a_shared_layer_stop_with_the_remedy(world_size: int) -> None:
    """Reported: an index and a guess. DDP cannot reduce such a layer; here all ranks stop at once, with its name and
    what to do."""
    batches = batches_of(world_size, 3)

    def work(comm: Comm) -> Ended:
        return end_of(Classifier(Recurrent(reentrant=True), feed(batches), optimizer=adamw))

    for end in run_ranks(work, world_size, timeout_s=15):
        assert (end.error, end.step) == ("RankFailed", 0), end
        assert "body." in end.text
        assert "use_reentrant=False" in end.text


@pytest.mark.parametrize(
    ("accumulate", "make_optimizer"), [(1, adamw), (2, momentum_sgd), (3, adamw)], ids=["1", "2", "3"]
)
def test_h44_static_graph_with_accumulation(world_size: int, accumulate: int, make_optimizer: Any) -> None:
    """Reported: an internal assert, and behind it gradients that are no longer reduced from the second window on."""
    batches = batches_of(world_size, 3 * accumulate)

    def work(comm: Comm) -> Ended:
        return end_of(
            Classifier(
                mlp(),
                feed(batches),
                optimizer=make_optimizer,
                strategy=safetrain.DDPStrategy(static_graph=True),
                loop=safetrain.Loop(accumulate=accumulate, nominal_weight=4),
            )
        )

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=3)

    windows = windows_of(batches, accumulate)
    assert_close(ended[0].state, run_ranks(lambda _: train_alone(mlp(), windows, make_optimizer), 1)[0])


class Adversaries(nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

    def generator_loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.discriminator(self.generator(x).tanh())).mean()

    def discriminator_loss(self, x: torch.Tensor) -> torch.Tensor:
        fake = self.generator(x.flip(0)).tanh().detach()
        return (F.softplus(-self.discriminator(x)) + F.softplus(self.discriminator(fake))).mean()


class InTurns(safetrain.Trainer):
    phases = ("discriminator", "generator")

    def training_step(self, batch: Batch) -> torch.Tensor:
        model: Any = self.model
        return model.generator_loss(batch[0]) if self.phase == "generator" else model.discriminator_loss(batch[0])


class AtOnce(safetrain.Trainer):
    def training_step(self, batch: Batch) -> Any:
        model: Any = self.model
        return {"generator": model.generator_loss(batch[0]), "discriminator": model.discriminator_loss(batch[0])}


def train_adversaries(windows: list[list[Batch]], *, in_turns: bool) -> dict[str, torch.Tensor]:
    model = Adversaries()
    optimizers = {
        "discriminator": momentum_sgd(model.discriminator.parameters()),
        "generator": adamw(model.generator.parameters()),
    }
    for step, window in enumerate(windows):
        names = [("discriminator", "generator")[step % 2]] if in_turns else ["generator", "discriminator"]
        gradients = {}
        for name in names:
            loss = torch.stack([getattr(model, f"{name}_loss")(x) for x, _ in window]).mean()
            parameters = list(getattr(model, name).parameters())
            gradients[name] = torch.autograd.grad(loss, parameters)
        for name in names:
            for parameter, gradient in zip(getattr(model, name).parameters(), gradients[name], strict=True):
                parameter.grad = gradient
            optimizers[name].step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("trainer_class", [InTurns, AtOnce])
def test_h45_two_nets_in_one_module_with_alternate_losses(
    world_size: int, trainer_class: type[safetrain.Trainer]
) -> None:
    """Reported: the official GAN example fails with the unused-parameter error. Here each loss trains its own
    optimizer's part."""
    batches = batches_of(world_size, 6)

    def work(comm: Comm) -> Ended:
        optimizers = {"discriminator": momentum_sgd, "generator": adamw}
        return end_of(trainer_class(Adversaries(), feed(batches), optimizer=optimizers))

    ended = run_ranks(work, world_size, timeout_s=15)
    assert_clean(ended, step=6)
    in_turns = trainer_class is InTurns
    assert not any("no gradient" in line for end in ended for line in end.log)
    expected = run_ranks(lambda _: train_adversaries(windows_of(batches), in_turns=in_turns), 1)[0]
    assert_close(ended[0].state, expected)
