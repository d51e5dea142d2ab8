"""Reported failures (their H-number in front) as people write them, in other forms than on the linter's page."""

from __future__ import annotations

import pytest

from safetrain.lint_command import check

DIST = "import torch\nimport torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
LOOP = f"""{DIST}
def train(net, loader, optimizer):
    model = DDP(net)
    for step, batch in enumerate(loader):
"""


def in_loop(*lines: str) -> str:
    return LOOP + "".join(f"        {line}\n" for line in lines)


def ids(code: str) -> list[str]:
    return [finding.id for finding in check("train.py", code)]


FOUND = {
    "H01 a random choice of the dataset without a seed": (
        "ST207",
        DIST + "from torch.utils.data import random_split\ntrain, val = random_split(data, [900, 100])\n",
    ),
    "H04 a gathered metric inside Join": (
        "ST107",
        DIST + "from torch.distributed.algorithms import Join\nwith Join([model]):\n    dist.all_gather(all, mine)\n",
    ),
    "H05 backward only where the loss is finite": (
        "ST104",
        in_loop("loss = model(batch).mean()", "if torch.isfinite(loss):", "    loss.backward()", "optimizer.step()"),
    ),
    "H05 continue where a helper flag says NaN": (
        "ST104",
        in_loop("loss = model(batch)", "is_bad = loss.isnan().any()", "if is_bad.item() != 0:", "    continue",
                "loss.backward()", "optimizer.step()"),
    ),
    "H07 an empty batch": (
        "ST104",
        in_loop("images, labels = batch", "if len(labels) == 0:", "    continue", "loss = model(images)",
                "loss.backward()", "optimizer.step()"),
    ),
    "H07 None from the collate function": (
        "ST104",
        in_loop("if batch is None:", "    continue", "model(batch).sum().backward()", "optimizer.step()"),
    ),
    "H07 an exception, then the next batch": (
        "ST105",
        in_loop("try:", "    loss = model(batch).sum()", "    loss.backward()", "except ValueError:", "    continue",
                "optimizer.step()"),
    ),
    "H08 a broadcast in a helper that rank 0 calls alone": (
        "ST101",
        DIST + "def log_dir(self):\n    dist.broadcast_object_list([path], 0)\n    return path\n\n"
        "def start(rank):\n    if rank == 0:\n        print(log_dir())\n",
    ),
    "H12 validation on rank 0 through the wrapper": (
        "ST102",
        DIST + "def run(net, rank):\n    model = DDP(net)\n    model.eval()\n    if rank == 0:\n"
        "        with torch.no_grad():\n"
        "            out = model(x)\n    return out\n",
    ),
    "H13 a barrier after an early return of rank 0's callback": (
        "ST103",
        DIST + "def on_epoch_end(trainer):\n    if not trainer.is_global_zero:\n        return\n    write()\n"
        "    dist.barrier()\n",
    ),
    "H13 a barrier in a function for rank 0 only": (
        "ST101",
        DIST + "from pytorch_lightning.utilities import rank_zero_only\n\n@rank_zero_only\ndef save():\n"
        "    dist.barrier()\n",
    ),
    "H17 gather_object on the main process": (
        "ST101",
        "from accelerate import Accelerator\naccelerator = Accelerator()\nif accelerator.is_main_process:\n"
        "    them = accelerator.gather_for_metrics(mine)\n",
    ),
    "H19 the cache that rank 0 has just written": (
        "ST106",
        DIST + "from pathlib import Path\ndef load(cache: Path, rank):\n    if cache.exists():\n"
        "        return read(cache)\n"
        "    if rank == 0:\n        build(cache)\n    dist.barrier()\n    return read(cache)\n",
    ),
    "H31 out of memory, skipping the batch": (
        "ST105",
        in_loop("try:", "    model(batch).sum().backward()", "except RuntimeError as error:",
                "    if 'out of memory' in str(error):", "        optimizer.zero_grad()",
                "        torch.cuda.empty_cache()",
                "        continue", "    else:", "        raise error", "optimizer.step()"),
    ),
    "H32 clean-up in finally by a function of its own": (
        "ST402",
        DIST + "def cleanup():\n    dist.destroy_process_group()\n\ntry:\n    main()\nfinally:\n    cleanup()\n",
    ),
    "H32 a barrier in finally": ("ST402", DIST + "try:\n    main()\nfinally:\n    dist.barrier()\n"),
    "H40 to the CPU to save, and back": (
        "ST305",
        DIST + "def run(net):\n    model = DDP(net.cuda())\n    save(model.cpu())\n    model.cuda()\n",
    ),
    "H43 static_graph and find_unused_parameters": (
        "ST308",
        DIST + "model = torch.nn.parallel.DistributedDataParallel(\n"
        "    net, find_unused_parameters=True, static_graph=True\n)\n",
    ),
    "H49 no_sync around backward only": (
        "ST307",
        DIST + "def step(model, batch, last):\n    loss = model(batch)\n    if not last:\n"
        "        with model.no_sync():\n"
        "            loss.backward()\n    else:\n        loss.backward()\n",
    ),
    "H52 clipping scaled gradients of the torch.cuda scaler": (
        "ST301",
        "from torch.cuda.amp import GradScaler\nfrom torch.nn.utils import clip_grad_norm_\nscaler = GradScaler()\n"
        "def step(model, loss, optimizer):\n    scaled = scaler.scale(loss)\n    scaled.backward()\n"
        "    clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer)\n    scaler.update()\n",
    ),
    "H53 no update at all": (
        "ST302",
        "import torch\nscaler = torch.amp.GradScaler()\ndef step(optimizer):\n    scaler.step(optimizer)\n",
    ),
    "H60 a sampler in a function of its own": (
        "ST201",
        DIST + "from torch.utils.data.distributed import DistributedSampler\ndef sampler_of(data):\n"
        "    return DistributedSampler(data)\n\ndef fit(loader):\n    for epoch in range(9):\n        run(loader)\n",
    ),
    "H65 a sampler seeded by rank and time": (
        "ST204",
        DIST + "from torch.utils.data import DistributedSampler\nrank = dist.get_rank()\n"
        "sampler = DistributedSampler(data, shuffle=True, seed=1000 * rank)\n",
    ),
    "H69 workers of all ranks draw alike": (
        "ST205",
        DIST + "import random\nfrom torch.utils.data import DataLoader\ndef init(worker_id):\n"
        "    random.seed(worker_id)\n"
        "loader = DataLoader(data, worker_init_fn=init)\n",
    ),
    "H81 a handler that saves and waits": (
        "ST108",
        DIST + "import signal\nclass Job:\n    def start(self):\n"
        "        signal.signal(signal.SIGUSR1, self.on_signal)\n\n"
        "    def on_signal(self, *_):\n        dist.all_reduce(self.flag)\n",
    ),
    "H87 every rank loads to where rank 0 saved": (
        "ST404",
        DIST + "def resume(net, path):\n    net.load_state_dict(torch.load(path))\n    return DDP(net)\n",
    ),
    "H91 the inner model by another name": (
        "ST306",
        in_loop("raw = model.module", "out = raw(batch)", "loss = out.mean()", "loss.backward()", "optimizer.step()"),
    ),
    "S02 shuffle beside a sampler": (
        "ST202",
        "from torch.utils.data import DataLoader\nDataLoader(data, 8, shuffle=True, batch_sampler=batches)\n",
    ),
    "S13 the least of the bad flags": (
        "ST109",
        DIST + "bad = torch.isnan(loss).int()\ndist.all_reduce(bad, dist.ReduceOp.MIN)\nif bad:\n    skip()\n",
    ),
    "S14 a dummy that is detached": ("ST309", DIST + "dummy = out.mean().detach()\ndummy.backward()\n"),
    "S14 zero times what is detached": (
        "ST309",
        DIST + "for name, p in model.named_parameters():\n    loss += 0 * p.detach().sum()\n",
    ),
    "S18 cast after the wrap": ("ST305", DIST + "model = DDP(net).half()\n"),
    "S18 a layer replaced after the optimizer": (
        "ST304",
        "import torch\nfrom torch import nn\ndef build(model):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=1)\n"
        "    model.head = nn.Linear(8, 3)\n    return model, optimizer\n",
    ),
    "S22 spawn in a script for torchrun": (
        "ST401",
        "import os\nfrom torch import multiprocessing as mp\nlocal_rank = int(os.environ.get('LOCAL_RANK', 0))\n"
        "if __name__ == '__main__':\n    mp.spawn(run, nprocs=8)\n",
    ),
    "S07 a renamed variable": ("ST405", "import os\nos.environ.setdefault('NCCL_BLOCKING_WAIT', '1')\n"),
    "every rank saves": (
        "ST403",
        DIST + "def main():\n    model = DDP(net)\n    for epoch in range(3):\n        run(model)\n"
        "        save(model)\n\ndef save(model):\n    torch.save(model.state_dict(), 'model.pt')\n\nmain()\n",
    ),
    "a checkpoint of all ranks on rank 0": (
        "ST101",
        "import torch.distributed.checkpoint as dcp\nimport torch.distributed as dist\nif dist.get_rank() == 0:\n"
        "    dcp.save(state, checkpoint_id=path)\n",
    ),
    "a Lightning checkpoint on rank 0": (
        "ST101",
        "import lightning as L\ndef end(trainer):\n    if trainer.is_global_zero:\n"
        "        trainer.save_checkpoint('last.ckpt')\n",
    ),
    "a synchronised log on rank 0": (
        "ST101",
        "import lightning as L\nclass Model(L.LightningModule):\n    def step(self, loss):\n"
        "        if self.global_rank == 0:\n"
        "            self.log('loss', loss, sync_dist=True)\n",
    ),
    "a barrier inside rank 0's own section": (
        "ST101",
        "import safetrain\nclass Mine(safetrain.Trainer):\n    def on_end(self):\n"
        "        with self.rank_zero('export') as mine:\n            if mine:\n"
        "                self.comm.barrier('exported')\n",
    ),
    "an agreement of rank 0 with itself": (
        "ST101",
        "import safetrain\nclass Mine(safetrain.Trainer):\n    def on_end(self):\n        if self.comm.rank == 0:\n"
        "            self.agree(1, 'max')\n",
    ),
    "a DeepSpeed checkpoint on rank 0": (
        "ST101",
        "import deepspeed, torch\nengine, optimizer, _, _ = deepspeed.initialize(model=model)\n"
        "if torch.distributed.get_rank() == 0:\n    engine.save_checkpoint('out')\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_it_is_found(case: str) -> None:
    id, code = FOUND[case]
    assert id in ids(code)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("rank == 0", "on rank 0 only"),
        ("rank != 0", "not called on rank 0"),
        ("not rank", "on rank 0 only"),
        ("0 == args.local_rank", "on rank 0 only"),
        ("dist.get_rank() == 0 and verbose", "on rank 0 only"),
        ("not distributed or utils.get_rank() == 0", "on rank 0 only"),
        ("RANK in {-1, 0}", "on rank 0 only"),
        ("local_rank not in [-1, 0]", "not called on rank 0"),
        ("int(os.environ['RANK']) == 0", "on rank 0 only"),
        ("os.environ.get('LOCAL_RANK', '0') == '0'", "on rank 0 only"),
        ("rank % 8 == 0", "on rank 0 only"),
        ("rank == dist.get_world_size() - 1", "on some ranks only"),
        ("is_main_process()", "on rank 0 only"),
        ("self.trainer.is_global_zero", "on rank 0 only"),
        ("accelerator.is_local_main_process", "on rank 0 only"),
        ("accelerator.process_index > 0", "not called on rank 0"),
        ("master_process", "on rank 0 only"),
        ("first", "on rank 0 only"),
        ("leads()", "on rank 0 only"),
        ("gpu == 0", "on rank 0 only"),
    ],
)
def test_conditions_on_the_rank(condition: str, words: str) -> None:
    code = f"""\
import os
import torch.distributed as dist
gpu = int(os.environ["LOCAL_RANK"])
first = dist.get_rank() == 0
def leads():
    return dist.get_rank() == 0
if {condition}:
    dist.barrier()
"""
    (finding,) = check("train.py", code)
    assert finding.id == "ST101"
    assert finding.what.endswith(words)
