"""What is trained in the benchmarks, and the loop that one writes by hand for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from safetrain.recipes.resnet_ddp import ResNet

RANKS = 2
SEED = 0
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how it is trained; ``batch_size`` is a rank's.

    Samples are numbers of ``sample_shape``, or ``tokens``: then each but the first is also a label.
    """

    title: str
    build_model: Callable[[], nn.Module]
    sample_shape: tuple[int, ...]
    batch_size: int = 32
    accumulate: int = 1
    clip_norm: float | None = 1.0
    dtype: torch.dtype = torch.float32
    tokens: bool = False
    batch_norm: bool = False

    def build_optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def build_data(self, steps: int) -> Dataset[Any]:
        """Random samples for ``steps`` optimizer steps."""
        generator = torch.Generator().manual_seed(SEED)
        count = steps * self.accumulate * self.batch_size * RANKS
        if self.tokens:
            text = torch.randint(256, (count, self.sample_shape[0] + 1), generator=generator)
            return TensorDataset(text[:, :-1], text[:, 1:])
        return TensorDataset(
            torch.randn(count, *self.sample_shape, generator=generator),
            torch.randint(CLASSES, (count,), generator=generator),
        )

    def loss(self, model: nn.Module, samples: Tensor, labels: Tensor) -> Tensor:
        """The mean over a batch."""
        return F.cross_entropy(model(samples).flatten(0, -2), labels.flatten())

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype is torch.float32 else torch.autocast("cpu", self.dtype)


def mlp(width: int = 256, layers: int = 4) -> nn.Module:
    hidden = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


class ManySmall(nn.Module):
    """As many parameter tensors as a large model, each of them tiny: the worst case for what is done once a tensor."""

    def __init__(self, tensors: int = 200, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(tensors // 2 - 1))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, samples: Tensor) -> Tensor:
        for layer in self.layers:
            samples = samples + layer(samples)
        return self.head(samples)


class SmallGPT(nn.Module):
    """A decoder of torch's own layers over bytes."""

    def __init__(self, width: int = 64, layers: int = 2, context: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


_mlp_4_ms = functools.partial(mlp, width=400)
_resnet = functools.partial(ResNet, CLASSES)
WORKLOADS = {
    "mlp": Workload("MLP 4x256", mlp, (256,)),
    "mlp_accumulate": Workload("MLP 4x256", mlp, (256,), accumulate=4),
    "mlp_unclipped": Workload("MLP 4x256, no clipping", mlp, (256,), clip_norm=None),
    "mlp_4ms": Workload("MLP 4x400", _mlp_4_ms, (400,)),
    "mlp_4ms_accumulate": Workload("MLP 4x400", _mlp_4_ms, (400,), accumulate=4),
    "mlp_4ms_bf16": Workload("MLP 4x400, bf16", _mlp_4_ms, (400,), dtype=torch.bfloat16),
    "mlp_4ms_fp16": Workload("MLP 4x400, fp16", _mlp_4_ms, (400,), dtype=torch.float16),
    "many_small": Workload("200 tiny parameter tensors", ManySmall, (16,)),
    "many_small_accumulate": Workload("200 tiny parameter tensors", ManySmall, (16,), accumulate=4),
    "resnet": Workload("ResNet of recipe=resnet_ddp, 8x8", _resnet, (3, 8, 8), batch_norm=True),
    "gpt": Workload("GPT, 2 layers of 64, 64 bytes", SmallGPT, (64,), batch_size=8, tokens=True),
    "gpt_accumulate": Workload("GPT, 2 layers of 64, 64 bytes", SmallGPT, (64,), 8, accumulate=4, tokens=True),
}


class BareLoop:
    """What one writes by hand for the same training: no logging, no checks, nothing counted.

    Data comes in the same order as safetrain's, or one after the other.
    """

    def __init__(self, work: Workload, steps: int, rank: int, ranks: int, *, shuffle: bool = True) -> None:
        torch.manual_seed(SEED)
        self.model = work.build_model()
        self._work = work
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._optimizer = work.build_optimizer(self.model.parameters())
        self._scaler = torch.amp.GradScaler("cpu", enabled=work.dtype is torch.float16)
        data = work.build_data(steps)
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            data, ranks, rank, shuffle=shuffle, seed=SEED, drop_last=True
        )
        self._loader = DataLoader(data, work.batch_size, sampler=self._sampler)
        self._epoch = 0

    def train_epoch(self, tick: Callable[[], object] = int) -> None:
        """``tick`` is called before each micro-batch."""
        work, ddp, optimizer, scaler = self._work, self._ddp, self._optimizer, self._scaler
        ddp.train()
        self._sampler.set_epoch(self._epoch)
        for index, (samples, labels) in enumerate(self._loader):
            tick()
            last = (index + 1) % work.accumulate == 0
            with nullcontext() if last else ddp.no_sync():
                with work.autocast():
                    loss = work.loss(ddp, samples, labels)
                scaler.scale(loss if work.accumulate == 1 else loss / work.accumulate).backward()
            if last:
                scaler.unscale_(optimizer)
                if work.clip_norm is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), work.clip_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        self._epoch += 1
