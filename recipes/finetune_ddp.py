"""Fine-tune a network: first only its new head, then, from epoch 2 on, all of it, the old part at a lower rate.

    python -m safetrain recipe=finetune_ddp

The old part has learned the handwritten digits 0 to 4, in a few seconds on rank 0, and is to tell 5 to 9 apart.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from safetrain import Trainer

CLASSES = 5
Batch = tuple[Tensor, Tensor]


class FineTuner(Trainer):
    """Trains a model that has a ``backbone``, which has learned something, and a ``head``, which has not.

    Args:
        unfreeze_epoch: the first epoch in which the backbone learns, too, counted from 0.
        backbone_lr: its learning rate; the head's is the optimizer's own.
        pretrain_epochs: passes over the digits 0 to 4 from which the backbone is to learn something.
    """

    model: Network

    def __init__(self, *, unfreeze_epoch: int, backbone_lr: float, pretrain_epochs: int, **parts: Any) -> None:
        super().__init__(**parts)
        self.unfreeze_epoch, self.backbone_lr, self.pretrain_epochs = unfreeze_epoch, backbone_lr, pretrain_epochs

    def build_model(self) -> Network:
        model = cast(Network, super().build_model())
        with self.rank_zero("pretrain") as mine:  # all ranks start from rank 0's weights: the others need none
            if mine:
                images, labels = digits("train", first=0).tensors
                pretrain(model.backbone, images, labels, self.pretrain_epochs)
        return model

    def parameter_groups(self) -> list[dict[str, Any]]:
        backbone = {"params": self.model.backbone.parameters(), "lr": self.backbone_lr}
        return [{"params": self.model.head.parameters()}, backbone]

    @property
    def frozen(self) -> bool:
        """Whether the backbone stays as it is."""
        return self.epoch < self.unfreeze_epoch

    def on_epoch_start(self) -> None:
        self.model.backbone.requires_grad_(not self.frozen)  # on all ranks alike: DDP is wrapped anew

    def training_step(self, batch: Batch) -> Tensor:
        self.model.backbone.train(not self.frozen)  # BatchNorm's statistics are no parameters, and would move
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Batch) -> None:
        images, labels = batch
        scores = self.model(images)
        self.log("loss", F.cross_entropy(scores, labels, reduction="none"))
        self.log("accuracy", (scores.argmax(dim=1) == labels).float())


class Network(nn.Module):
    """Scores of 5 classes for images of ``1 x 8 x 8``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


def pretrain(backbone: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train ``backbone``, with a head that is thrown away, to tell ``labels`` from each other. No rank but this one."""
    head = nn.Linear(backbone(images[:2]).shape[1], CLASSES)
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(head(backbone(images[chosen])), labels[chosen]).backward()
            optimizer.step()


def digits(split: Literal["train", "val"], first: int) -> TensorDataset:
    """The digits ``first`` to ``first + 4`` of scikit-learn, labelled from 0; every fifth is for validation."""
    from sklearn.datasets import load_digits  # 1.5 s to import: only where the digits are used

    loaded = load_digits()
    images, labels = torch.from_numpy(loaded.images).float()[:, None] / 16, torch.from_numpy(loaded.target) - first
    wanted = (labels >= 0) & (labels < CLASSES)
    chosen = wanted & ((torch.arange(len(labels)) % 5 == 0) == (split == "val"))
    return TensorDataset(images[chosen], labels[chosen])
