"""Classify images with a small ResNet: scikit-learn's handwritten digits, or a folder of your own pictures.

    python -m safetrain recipe=resnet_ddp

Images are 3 x height x width floats, labels are class numbers; a batch is the pair (images, labels).
``python -m safetrain.recipes.resnet_ddp FOLDER`` lists every picture below a folder that cannot be read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from safetrain import Trainer
from safetrain.errors import DataError

Split = Literal["train", "val"]
Batch = tuple[Tensor, Tensor]


class Classifier(Trainer):
    """Trains a model that gives a score to each class: a module, or what makes one when told ``num_classes``."""

    def build_model(self) -> nn.Module:
        model: nn.Module | Callable[..., nn.Module] = super().build_model()
        if isinstance(model, nn.Module):
            return model
        return model(num_classes=cast(LabelledImages, self.build_train_data()).num_classes)

    def training_step(self, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Batch) -> None:
        images, labels = batch
        scores = self.model(images)
        self.log("loss", F.cross_entropy(scores, labels, reduction="none"))
        self.log("accuracy", (scores.argmax(dim=1) == labels).float())


class ResNet(nn.Module):
    """A residual network for pictures of 8 to 32 pixels: each stage but the first halves the size, nothing else does.

    Args:
        num_classes: scores per image.
        width: channels of the first stage; each further stage has twice as many.
        blocks: residual blocks in each stage.
    """

    def __init__(self, num_classes: int, width: int = 16, blocks: Sequence[int] = (1, 1, 1)) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                out_channels = width * 2**stage
                stages.append(Block(channels, out_channels, stride=2 if stage > 0 and block == 0 else 1))
                channels = out_channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.residual(images) + self.shortcut(images))


def warmup_cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0) -> LRScheduler:
    """The learning rate rises linearly for ``warmup_steps`` optimizer steps, then falls along a cosine to zero."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)


class LabelledImages(Protocol):
    """A data set of (image, label) that knows its classes."""

    num_classes: int


class Digits(Dataset[tuple[Tensor, int]]):
    """scikit-learn's handwritten digits: 1797 images of 8x8 pixels. Every fifth is for validation, always the same.

    The one grey channel is repeated, so that any model for colour pictures fits.
    """

    num_classes = 10

    def __init__(self, split: Split) -> None:
        from sklearn.datasets import load_digits  # 1.5 s to import: only where the digits are used

        digits = load_digits()
        for_validation = torch.arange(len(digits.target)) % 5 == 0
        chosen = for_validation if split == "val" else ~for_validation
        self._images = (torch.from_numpy(digits.images).float() / 16)[chosen].unsqueeze(1).expand(-1, 3, -1, -1)
        self._labels: list[int] = torch.from_numpy(digits.target)[chosen].tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], self._labels[index]


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Pictures in ``root/train/<class>/`` and ``root/val/<class>/``; classes are numbered in alphabetical order.

    For training a random square of a picture is taken and flipped half of the time, for validation the middle.

    Raises:
        DataError: a folder is missing, a class is empty or not in both splits; later, a picture can't be read.
    """

    suffixes = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
    smallest_area = 0.25
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet, as pretrained models expect
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def __init__(self, root: str, split: Split, image_size: int) -> None:
        self._training, self._image_size = split == "train", image_size
        classes = class_folders(Path(root) / "train")
        here = class_folders(Path(root) / split)
        if here != classes:
            raise DataError(
                f"{Path(root) / split} and {Path(root) / 'train'} must have the same class folders, or labels would "
                f"mean different things. Only in one of them: {', '.join(sorted(set(here) ^ set(classes)))}"
            )
        self.num_classes = len(classes)
        self._paths: list[str] = []
        self._labels: list[int] = []
        for label, name in enumerate(classes):
            pictures = pictures_of_class(Path(root) / split / name)
            self._paths += map(str, pictures)
            self._labels += [label] * len(pictures)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = read_picture(Path(self._paths[index]))
        picture = self._cut_at_random(picture) if self._training else self._cut_in_the_middle(picture)
        picture = F.interpolate(picture[None], size=(self._image_size,) * 2, mode="bilinear", antialias=True)[0]
        if self._training and torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return (picture - self.mean) / self.std, self._labels[index]

    def _cut_at_random(self, picture: Tensor) -> Tensor:
        """A square of at least ``smallest_area`` of the largest that fits, at a random place."""
        area = float(torch.empty(()).uniform_(self.smallest_area, 1))
        side = max(1, round(min(picture.shape[1:]) * math.sqrt(area)))
        top, left = (int(torch.randint(size - side + 1, ())) for size in picture.shape[1:])
        return picture[:, top : top + side, left : left + side]

    def _cut_in_the_middle(self, picture: Tensor) -> Tensor:
        side = min(picture.shape[1:])
        top, left = ((size - side) // 2 for size in picture.shape[1:])
        return picture[:, top : top + side, left : left + side]


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in ``folder``, in alphabetical order."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: data.root must hold train/<class>/ and val/<class>/")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not names:
        raise DataError(f"{folder} holds no folders: it must hold one for each class, with that class' pictures")
    return names


def find_pictures(folder: Path) -> list[Path]:
    """Every picture below ``folder``, in alphabetical order."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in ImageFolder.suffixes)


def pictures_of_class(folder: Path) -> list[Path]:
    """The pictures of one class; at least one."""
    pictures = find_pictures(folder)
    if not pictures:
        raise DataError(
            f"class {folder.name} is empty: {folder} has no file that ends in {', '.join(ImageFolder.suffixes)}. "
            "Add pictures, or remove the folder from train and val."
        )
    return pictures


def read_picture(path: Path) -> Tensor:
    """A picture as floats from 0 to 1, 3 x height x width."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            colour = image.convert("RGB")
    except Exception as error:  # noqa: BLE001  damaged files make Pillow's decoders raise almost anything
        raise DataError(
            f"{path} can't be read as a picture ({error}). Repair or remove it; all such files are listed by "
            f"`python -m safetrain.recipes.resnet_ddp {path.parent.parent}`"
        ) from None
    pixels = torch.frombuffer(bytearray(colour.tobytes()), dtype=torch.uint8)
    return pixels.view(colour.height, colour.width, 3).permute(2, 0, 1) / 255


def list_unreadable(folder: Path) -> int:
    """Print the pictures below ``folder`` that can't be read; the number of them."""
    count = 0
    for path in find_pictures(folder):
        try:
            read_picture(path)
        except DataError as error:
            print(str(error).partition(". Repair")[0])
            count += 1
    return count


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m safetrain.recipes.resnet_ddp FOLDER")
    sys.exit(list_unreadable(Path(sys.argv[1])) > 0)
