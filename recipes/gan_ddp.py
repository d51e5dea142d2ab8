"""A small GAN draws handwritten digits; generator and critic take turns.

    python -m safetrain recipe=gan_ddp

It is told which digit to draw. So a classifier that never changes, the mean of the real digits of each class that is
nearest, can say how many of the drawn ones are what was asked for.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from safetrain import Trainer

PIXELS, CLASSES = 64, 10
Batch = tuple[Tensor, Tensor]


class Gan(Trainer):
    """A batch is (pixels, labels): ``samples x 64`` floats from -1 to 1, and the number of the class."""

    # an optimizer each, by the names of the model's parts; each turn has batches of its own and one optimizer step
    phases = ("critic", "generator")

    model: Pair

    def training_step(self, batch: Batch) -> dict[str, Tensor]:
        real, labels = batch
        if self.phase == "generator":
            fooled = self.model.critic(self.model.draw(labels), labels)
            return {"generator": F.softplus(-fooled).mean()}
        with torch.no_grad():
            drawn = self.model.draw(labels)
        on_real, on_drawn = self.model.critic(real, labels), self.model.critic(drawn, labels)
        return {"critic": F.softplus(-on_real).mean() + F.softplus(on_drawn).mean()}

    def validation_step(self, batch: Batch) -> None:
        _, labels = batch
        distances = torch.cdist(self.model.draw(labels), self.model.class_means)
        self.log("as_asked", (distances.argmin(dim=1) == labels).float())
        # a generator that draws each digit in one way only is near to one point, maybe the mean itself
        self.log("spread", distances.gather(1, labels[:, None])[:, 0] / self.model.real_spread)


class Pair(nn.Module):
    """Both networks, under the names of their optimizers, and what is known of real digits.

    Args:
        width: of the hidden layers; ``noise``: how many random numbers a digit is drawn from.
    """

    class_means: Tensor  # classes x 64
    real_spread: Tensor  # scalar: how far a real digit is from the mean of its class

    def __init__(self, width: int = 128, noise: int = 16) -> None:
        super().__init__()
        self.noise = noise
        self.generator = Network(noise, PIXELS, width)
        self.critic = Network(PIXELS, 1, width)
        pixels, labels = digits("train").tensors
        means = torch.stack([pixels[labels == label].mean(dim=0) for label in range(CLASSES)])
        self.register_buffer("class_means", means)
        self.register_buffer("real_spread", (pixels - means[labels]).norm(dim=1).mean())

    def draw(self, labels: Tensor) -> Tensor:
        """A digit for each label, ``samples x 64``."""
        noise = torch.randn(len(labels), self.noise, device=labels.device)
        return self.generator(noise, labels).tanh()


class Network(nn.Module):
    """Two hidden layers that also see which digit it is about."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs + CLASSES, width), nn.LeakyReLU(0.2),
            nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, outputs),
        )  # fmt: skip

    def forward(self, values: Tensor, labels: Tensor) -> Tensor:
        return self.layers(torch.cat([values, F.one_hot(labels, CLASSES)], dim=1))


def digits(split: Literal["train", "val"]) -> TensorDataset:
    """scikit-learn's handwritten digits; every fifth is for validation."""
    from sklearn.datasets import load_digits  # 1.5 s to import: only where the digits are used

    loaded = load_digits()
    chosen = (torch.arange(len(loaded.target)) % 5 == 0) == (split == "val")
    pixels, labels = torch.from_numpy(loaded.data).float() / 8 - 1, torch.from_numpy(loaded.target)
    return TensorDataset(pixels[chosen], labels[chosen])
