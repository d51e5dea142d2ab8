"""The trainers that one would pick, each on the same work: model, data in the same order, optimizer, clipping.

Each is a function of a workload, of the optimizer steps to take, and of ``tick``, which it calls before each
micro-batch; it returns the trained model. They run on ranks that torchrun started, and log and save nothing.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

import safetrain
from benchmarks.workloads import SEED, BareLoop, Workload
from safetrain.precision import BF16, FP16, FP32

Tick = Callable[[], object]
Contender = Callable[[Workload, int, Tick], nn.Module]

_MIXED = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


class CannotDo(Exception):
    """A trainer refuses the work; the message is its own."""


def bare(work: Workload, steps: int, tick: Tick) -> nn.Module:
    loop = BareLoop(work, steps, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), shuffle=False)
    loop.train_epoch(tick)
    return loop.model


class _Ours(safetrain.Trainer):
    work: Workload
    tick: Tick

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.tick()
        return self.work.loss(self.model, *batch)


def ours(work: Workload, steps: int, tick: Tick) -> nn.Module:
    torch.manual_seed(SEED)
    precision = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}[work.dtype]()
    trainer = _Ours(
        work.build_model(),
        work.build_data(steps),
        optimizer=work.build_optimizer,
        loop=safetrain.Loop(accumulate=work.accumulate, clip_norm=work.clip_norm),
        loader=safetrain.Loader(batch_size=work.batch_size, shuffle=False),
        precision=precision,
        seed=SEED,
        device="cpu",
    )
    trainer.work, trainer.tick = work, tick
    trainer.fit()
    return trainer.model


def lightning(work: Workload, steps: int, tick: Tick) -> nn.Module:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build_model()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            tick()
            return work.loss(self.model, *batch)

        def configure_optimizers(self) -> Optimizer:
            return work.build_optimizer(self.model.parameters())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(SEED)
    module = Module()
    precision = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[_MIXED[work.dtype]]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_epochs=1,
        accumulate_grad_batches=work.accumulate, gradient_clip_val=work.clip_norm, precision=precision,  # type: ignore[arg-type]
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = work.build_data(steps)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, shuffle=False)
    trainer.fit(module, DataLoader(data, work.batch_size, sampler=sampler))
    return module.model


def fabric(work: Workload, steps: int, tick: Tick) -> nn.Module:
    from lightning import Fabric

    precision = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[_MIXED[work.dtype]]
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp", precision=precision)  # type: ignore[arg-type]
    fabric.launch()
    torch.manual_seed(SEED)
    bare_model = work.build_model()
    model, optimizer = fabric.setup(bare_model, work.build_optimizer(bare_model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(work.build_data(steps), work.batch_size, shuffle=False))
    model.train()
    for index, batch in enumerate(loader):
        tick()
        last = (index + 1) % work.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(work.loss(model, *batch) / work.accumulate)
        if last:
            if work.clip_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=work.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return bare_model


def accelerate(work: Workload, steps: int, tick: Tick) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()  # it remembers the precision of an earlier turn
    PartialState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulate, mixed_precision=_MIXED[work.dtype])
    torch.manual_seed(SEED)
    bare_model = work.build_model()
    model, optimizer, loader = accelerator.prepare(
        bare_model,
        work.build_optimizer(bare_model.parameters()),
        DataLoader(work.build_data(steps), work.batch_size, shuffle=False),
    )
    model.train()
    for batch in loader:
        tick()
        with accelerator.accumulate(model):
            accelerator.backward(work.loss(model, *batch))
            if work.clip_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), work.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return bare_model


def hugging_face(work: Workload, steps: int, tick: Tick) -> nn.Module:
    import transformers
    from accelerate.state import AcceleratorState, PartialState

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build_model()

        def forward(self, samples: Tensor, labels: Tensor) -> dict[str, Tensor]:
            tick()
            return {"loss": work.loss(self.model, samples, labels)}

    def collate(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        samples, labels = zip(*pairs, strict=True)
        return {"samples": torch.stack(samples), "labels": torch.stack(labels)}

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    AcceleratorState._reset_state()
    PartialState._reset_state()
    torch.manual_seed(SEED)
    model = WithLoss()
    optimizer = work.build_optimizer(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=work.batch_size, gradient_accumulation_steps=work.accumulate,
            num_train_epochs=1, max_grad_norm=work.clip_norm or 0.0, use_cpu=True, ddp_backend="gloo", seed=SEED,
            bf16=work.dtype is torch.bfloat16, fp16=work.dtype is torch.float16,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = InOrder(
            model, arguments, train_dataset=work.build_data(steps),
            data_collator=collate,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        )  # fmt: skip
        trainer.train()
    return model.model


CONTENDERS: dict[str, Contender] = {
    "bare loop": bare,
    "safetrain": ours,
    "Lightning": lightning,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Hugging Face": hugging_face,
}

SAME_SHARES = ("bare loop", "safetrain", "Lightning", "Fabric")
"""Those in which a rank's batches are the bare loop's; in the others it has other samples of the same step."""


def quietly(contender: Contender, work: Workload, steps: int, tick: Tick) -> nn.Module:
    """Run it, without what the peers say about a training that logs nothing.

    Raises:
        CannotDo: it refuses this work.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return contender(work, steps, tick)
        except (ValueError, ImportError) as error:
            raise CannotDo(str(error).splitlines()[0]) from error
