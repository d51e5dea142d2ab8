"""Train on a stream: files of different lengths, read line by line by several loader processes of each rank.

    python -m safetrain recipe=stream_ddp

Rank 0 writes scikit-learn's handwritten digits to text files first, one digit a line: its label, then its 64 pixels.
``python -m safetrain.recipes.stream_ddp RUN_DIRECTORY`` adds up how many digits all ranks together trained on.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset

from safetrain import Trainer
from safetrain.errors import DataError

Sample = tuple[Tensor, int]


class Reader(Trainer):
    """Classifies digits that are read from the files in ``folder``, which all ranks must see.

    Args:
        files: how many are written, where there are none; each is longer than the one before.
    """

    def __init__(self, *, folder: str, files: int, **parts: Any) -> None:
        super().__init__(**parts)
        self.folder, self.files = Path(folder), files

    def build_train_data(self) -> IterableDataset[Sample]:
        with self.rank_zero("write the digits") as mine:  # no other rank sees half a file
            if mine and not self.folder.exists():
                write_digits(self.folder, self.files)
        return Lines(self.folder, "train", shuffle=True)

    def build_val_data(self) -> IterableDataset[Sample]:
        return Lines(self.folder, "val", shuffle=False)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, labels = batch
        self.log("samples", len(labels), how="sum")
        return F.cross_entropy(self.model(pixels), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        pixels, labels = batch
        self.log("accuracy", (self.model(pixels).argmax(dim=1) == labels).float())
        self.log("samples", len(labels), how="sum")


class Lines(IterableDataset[Sample]):
    """The lines of the files ``<split>_*.txt``. Each loader process of each rank reads files of its own.

    Shuffled, both the order of the files and the lines of a file change from epoch to epoch; all processes deal out the
    same order of files.
    """

    def __init__(self, folder: Path, split: str, *, shuffle: bool) -> None:
        self._paths = sorted(folder.glob(f"{split}_*.txt"))
        if not self._paths:
            raise DataError(f"there is no {split}_*.txt in {folder}")
        self._shuffle = shuffle
        self._epoch, self._shard, self._shards = 0, 0, 1

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch, in every process that reads."""
        self._epoch = epoch

    def set_shard(self, shard: int, shards: int) -> None:
        """Called before each ``iter()``: which of all loader processes of all ranks this one is."""
        self._shard, self._shards = shard, shards

    def __iter__(self) -> Iterator[Sample]:
        order, draw = list(self._paths), random.Random(self._epoch)  # not the process' own: all must draw alike
        if self._shuffle:
            draw.shuffle(order)
        for path in order[self._shard :: self._shards]:
            lines = path.read_text().splitlines()
            if self._shuffle:
                draw.shuffle(lines)
            for line in lines:
                label, *pixels = map(int, line.split())
                yield torch.tensor(pixels) / 16, label


def write_digits(folder: Path, files: int) -> None:
    """Every fifth digit to ``val_*.txt``, the others to ``files`` files ``train_*.txt``; there at once, and whole.

    The n-th file gets a share in proportion to n, so that every process has another number of digits.
    """
    from sklearn.datasets import load_digits  # 1.5 s to import: on rank 0 only

    digits = load_digits()
    lines = [" ".join(map(str, [label, *map(int, row)])) for label, row in zip(digits.target, digits.data, strict=True)]
    numbers, draw = range(1, files + 1), random.Random(0)
    texts: dict[str, list[str]] = {}
    for index, line in enumerate(lines):
        name = f"val_{index // 5 % 4}" if index % 5 == 0 else f"train_{draw.choices(numbers, weights=numbers)[0]:02}"
        texts.setdefault(name, []).append(line)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    for name, chosen in texts.items():
        (unfinished / f"{name}.txt").write_text("\n".join(chosen) + "\n")
    unfinished.rename(folder)


def samples_of_epochs(run_dir: Path) -> Counter[int]:
    """How many digits all ranks together trained on in each epoch, from what the run has logged."""
    counted: Counter[int] = Counter()
    for event in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines()):
        if event["kind"] == "train":
            counted[event["epoch"]] += int(event["metrics"].get("train/samples", 0))
    return counted


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m safetrain.recipes.stream_ddp RUN_DIRECTORY")
    for epoch, count in sorted(samples_of_epochs(Path(sys.argv[1])).items()):
        print(f"epoch {epoch}: {count:,} samples")
