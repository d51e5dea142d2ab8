"""A small GPT that learns to write Python, byte by byte, from Python's own standard library.

    python -m safetrain recipe=gpt_ddp

A sample is a block of one file: ``context`` bytes, and for each the byte that follows it. A file's last block is
shorter, and padded; the loss is a mean over real bytes, so its weight is their number.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from safetrain import Loss, Trainer

BYTES = 256
PADDING = -100  # what cross_entropy leaves out
Batch = tuple[Tensor, Tensor]


class Writer(Trainer):
    """Trains on (bytes, next bytes), two batches of ``samples x context`` int64, and writes a sample at the end.

    Args:
        prompt: what the sample begins with; ``sample_bytes``: how many bytes are added to it.
    """

    model: GPT

    def __init__(self, *, prompt: str = "def ", sample_bytes: int = 300, **parts: Any) -> None:
        super().__init__(**parts)
        self.prompt, self.sample_bytes = prompt, sample_bytes

    def training_step(self, batch: Batch) -> Loss:
        seen, following = batch
        loss = F.cross_entropy(self.model(seen).flatten(0, 1), following.flatten(), ignore_index=PADDING)
        return Loss(loss, weight=(following != PADDING).sum())

    def validation_step(self, batch: Batch) -> None:
        seen, following = batch
        real = following != PADDING
        self.log("loss", F.cross_entropy(self.model(seen)[real].float(), following[real], reduction="none"))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Weight decay is for matrices: the numbers of a norm or a bias are not to be pulled to zero."""
        vectors = [weight for weight in self.model.parameters() if weight.dim() < 2]
        matrices = [weight for weight in self.model.parameters() if weight.dim() >= 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

    def derived_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(metrics["loss"])}  # of a byte: among how many it is still in doubt

    def on_train_end(self) -> None:
        with self.rank_zero("sample") as mine:
            if mine:
                print(f"\n{generate(self.model, self.prompt.encode(), self.sample_bytes).decode(errors='replace')}\n")


class GPT(nn.Module):
    """Scores of the next byte after each of up to ``context`` bytes: ``samples x bytes x 256``."""

    def __init__(self, context: int, width: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, seen: Tensor) -> Tensor:
        hidden = self.bytes(seen) + self.places(torch.arange(seen.shape[1], device=seen.device))
        # The embedding is the last layer, too. Used twice, it is one parameter with one name: DDP waits for one
        # gradient, and a checkpoint holds it once. Two modules that share a Parameter would give it two names.
        return F.linear(self.norm(self.blocks(hidden)), self.bytes.weight)


class Block(nn.Module):
    """Attention to what came before, then a small network for each place, both beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
        self.network = nn.ModuleDict({"into": nn.Linear(width, 4 * width), "out": nn.Linear(4 * width, width)})

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.attention["qkv"](self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each: samples x heads x bytes x width of a head
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention["out"](attended.transpose(1, 2).flatten(2))
        return hidden + self.network["out"](F.gelu(self.network["into"](self.network_norm(hidden))))


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int) -> bytes:
    """``prompt`` and ``count`` bytes that the model draws after it. Draws from torch's generator."""
    text = list(prompt)
    for _ in range(count):
        scores = model(torch.tensor([text[-model.context :]], device=model.bytes.weight.device))[0, -1]
        text.append(int(torch.multinomial(scores.float().softmax(0), 1)))
    return bytes(text)


class StandardLibrary(Dataset[Batch]):
    """The files of this Python's standard library, without its tests, in blocks of at most ``context`` bytes.

    In the order of their paths, every 50th file is for validation: the same on every rank, and no block is in both.
    """

    left_out = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

    def __init__(self, split: Literal["train", "val"], context: int) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        found = (path.relative_to(root) for path in root.rglob("*.py"))
        paths = sorted(path for path in found if not self.left_out.intersection(path.parts))
        chosen = [path for number, path in enumerate(paths) if (number % 50 == 0) == (split == "val")]
        texts = [text for path in chosen if len(text := (root / path).read_bytes()) > 1]  # some are empty
        self._context = context
        self._text = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        ends = torch.tensor([len(text) for text in texts]).cumsum(0).tolist()
        blocks = [torch.arange(end - len(text), end - 1, context) for text, end in zip(texts, ends, strict=True)]
        self._starts = torch.cat(blocks)
        self._ends = torch.cat([torch.full_like(starts, end) for starts, end in zip(blocks, ends, strict=True)])

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Batch:
        start, end = int(self._starts[index]), int(self._ends[index])
        block = self._text[start : min(start + self._context + 1, end)].long()
        seen, following = torch.zeros(self._context).long(), torch.full((self._context,), PADDING)
        seen[: len(block) - 1], following[: len(block) - 1] = block[:-1], block[1:]
        return seen, following


def warmup_cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0) -> LRScheduler:
    """The learning rate rises linearly for ``warmup_steps`` optimizer steps, then falls along a cosine to a tenth."""

    def factor(step: int) -> float:
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return (step + 1) / warmup_steps if progress < 0 else 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))

    return LambdaLR(optimizer, factor)
