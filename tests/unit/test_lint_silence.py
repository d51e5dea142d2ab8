"""What the linter says nothing of: right code that looks like wrong code."""

from __future__ import annotations

import pytest

from safetrain.lint_command import check
from tests.unit.test_lint_hangs import DIST, in_loop

RIGHT = {
    "rank 0 first, then the others": DIST
    + "if local_rank not in (-1, 0):\n    dist.barrier()\nload()\nif local_rank == 0:\n    dist.barrier()\n",
    "a context manager for rank 0 first": DIST
    + "def rank_zero_first(rank):\n    if rank not in [-1, 0]:\n        dist.barrier()\n    yield\n    if rank == 0:\n"
    "        dist.barrier()\n",
    "each rank calls it in its way": DIST
    + "if rank == 0:\n    dist.gather(x, them)\nelse:\n    dist.gather(x)\n",
    "the last rank calls it in its way": DIST
    + "if rank == world_size - 1:\n    dist.gather(x, them)\nelse:\n    dist.gather(x)\n",
    "another class's model of the same name": DIST
    + "class One:\n    def __init__(self, net):\n        self.model = DDP(net)\n\nclass Other:\n"
    "    def look(self, rank, x):\n        if rank == 0:\n            return self.model(x)\n",
    "backward of one loss or of another": in_loop(
        "loss = model(batch).sum()", "if loss > 5:", "    (loss * 0.1).backward()", "else:", "    loss.backward()",
        "optimizer.step()",
    ),
    "a target of the inner model without gradients": in_loop(
        "with torch.no_grad():", "    target = model.module(batch)", "loss = (model(batch) - target).sum()",
        "loss.backward()", "optimizer.step()",
    ),
    "clipped where nothing is scaled": "import torch\nscaler = torch.amp.GradScaler()\n"
    "def step(loss, model, optimizer, amp):\n    if amp:\n        scaler.scale(loss).backward()\n    else:\n"
    "        loss.backward()\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n    if amp:\n"
    "        scaler.step(optimizer)\n        scaler.update()\n    else:\n        optimizer.step()\n",
    "the inner model after training": DIST
    + "def run(net, x):\n    model = DDP(net)\n    loss = model(x)\n    loss.backward()\n    inner = model.module\n"
    "    loss = inner(x)\n    print(loss)\n",
    "backward of distributed autograd": DIST
    + "import torch.distributed.autograd as dist_autograd\ndef run(rank, loss):\n    if rank != 0:\n        return\n"
    "    dist_autograd.backward(1, [loss])\n",
    "no_sync of another model than the static one": DIST
    + "def one(net, x):\n    model = DDP(net)\n    with model.no_sync():\n        model(x).backward()\n\n"
    "def other(net, x):\n    model = DDP(net, static_graph=True)\n    model(x).backward()\n",
    "in nested arms": DIST
    + "if rank == 0:\n    if big:\n        dist.broadcast(x, 0)\nelse:\n    dist.broadcast(x, 0)\n",
    "a group of some ranks": DIST + "if rank in members:\n    dist.all_reduce(x, group=members_group)\n",
    "a group by position": DIST + "if rank < 4:\n    dist.barrier(first_group)\n",
    "whether there are several at all": DIST + "if local_rank != -1:\n    dist.barrier()\n",
    "whether there are several at all, by the number": DIST + "if world_size > 1:\n    dist.barrier()\n",
    "a rank that is there": DIST + "if rank is not None:\n    dist.barrier()\n",
    "a world size from a function that also tells the rank": DIST
    + "world_size, rank = get_world_size_and_rank()\nif world_size > 1:\n    dist.barrier()\n",
    "the rank of a matrix": DIST + "if torch.linalg.matrix_rank(x) == 0:\n    dist.barrier()\n",
    "the rank of an adapter": DIST + "if lora_rank == 0:\n    dist.barrier()\n",
    "what rank 0 does alone, and a barrier for all": "import safetrain\nclass Mine(safetrain.Trainer):\n"
    "    def on_end(self):\n        with self.rank_zero('export') as mine:\n            if mine:\n"
    "                write()\n"
    "        self.comm.barrier('exported')\n",
    "the device waits for itself": DIST + "if rank == 0:\n    torch.cuda.synchronize()\n",
    "a value of the loss, printed by one": in_loop(
        "loss = model(batch).mean()", "loss.backward()", "optimizer.step()", "if dist.get_rank() == 0:",
        "    print(loss.item())",
    ),
    "loss.item() of one rank in a variable": in_loop(
        "loss = model(batch).mean()", "loss.backward()", "optimizer.step()", "if rank == 0:", "    shown = loss.item()",
        "    if shown > 9:", "        print(shown)",
    ),
    "point to point": DIST + "if rank == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)\n",
    "an early return of all but 0 at the end": DIST
    + "def save(model, rank):\n    dist.barrier()\n    if rank != 0:\n        return\n    torch.save(model, 'x')\n",
    "an early return with its own barrier": DIST
    + "def prepare(rank):\n    if rank != 0:\n        dist.barrier()\n        return\n    build()\n"
    "    dist.barrier()\n",
    "an early return where there is one process": DIST
    + "def reduce(x):\n    if world_size < 2:\n        return x\n    dist.all_reduce(x)\n    return x\n",
    "the last step": in_loop(
        "if step >= limit:", "    break", "model(batch).sum().backward()", "optimizer.step()"
    ),
    "a window that is not full": in_loop(
        "model(batch).sum().backward()", "if (step + 1) % 4 != 0:", "    continue", "optimizer.step()"
    ),
    "a reduced flag": in_loop(
        "loss = model(batch).sum()", "bad = loss.isnan().float()", "dist.all_reduce(bad)", "if bad > 0:",
        "    continue",
        "loss.backward()", "optimizer.step()",
    ),
    "a reduced loss": in_loop(
        "loss = model(batch).sum()", "value = reduce_mean(loss).item()", "if not math.isfinite(value):", "    break",
        "loss.backward()", "optimizer.step()",
    ),
    "the norm of reduced gradients": in_loop(
        "loss = model(batch).sum()", "loss.backward()", "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1)",
        "if not torch.isfinite(norm):", "    continue", "optimizer.step()",
    ),
    "the form of what the model returns": in_loop(
        "out = model(batch)", "if isinstance(out, tuple):", "    out = out[0]", "if out.dim() > 1:",
        "    out = out.mean()",
        "out.backward()", "optimizer.step()",
    ),
    "a loss that raises": in_loop(
        "loss = model(batch).sum()", "if torch.isnan(loss):", "    raise FloatingPointError", "loss.backward()",
        "optimizer.step()",
    ),
    "an exception that goes on": in_loop(
        "try:", "    model(batch).sum().backward()", "except RuntimeError:", "    print(batch)", "    raise",
        "optimizer.step()"
    ),
    "an exception that only one process survives": in_loop(
        "try:", "    model(batch).sum().backward()", "except RuntimeError:", "    if world_size > 1:", "        raise",
        "    continue", "optimizer.step()",
    ),
    "a measured backward": "import torch.distributed as dist\ndef profile(ops):\n    for op in ops:\n        try:\n"
    "            op().backward()\n        except Exception:\n            continue\n",
    "a loader that is empty": in_loop("model(batch).sum().backward()", "optimizer.step()")
    + "    try:\n        return next(loader)\n    except StopIteration:\n        return None\n",
    "set_epoch by the loader": DIST
    + "from torch.utils.data import DataLoader, DistributedSampler\n"
    "loader = DataLoader(d, sampler=DistributedSampler(d))\n"
    "for epoch in range(3):\n    loader.sampler.set_epoch(epoch)\n    run(loader)\n",
    "set_epoch in another file": DIST
    + "from engine import train_one_epoch\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
    "def build(d):\n    return DataLoader(d, sampler=DistributedSampler(d))\n"
    "def fit(loader):\n    for epoch in range(3):\n        train_one_epoch(loader, epoch)\n",
    "set_epoch in a wrapper's file": DIST
    + "from data import Forever\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
    "def build(d):\n    loader = DataLoader(d, sampler=DistributedSampler(d))\n    return Forever(loader)\n"
    "def fit(self):\n    for epoch in range(3):\n        self.run(epoch)\n",
    "a sampler that keeps the order": DIST
    + "from torch.utils.data import DistributedSampler\ns = DistributedSampler(d, shuffle=False)\n"
    "for epoch in range(3):\n    for batch in s:\n        run(batch)\n",
    "shuffle where there is no sampler": "from torch.utils.data import DataLoader\n"
    "DataLoader(d, shuffle=(sampler is None), sampler=sampler)\nDataLoader(d, shuffle=True, sampler=None)\n",
    "shuffle=True in a script of one process": "from torch.utils.data import DataLoader\nDataLoader(d, shuffle=True)\n",
    "a share made by hand": DIST
    + "from torch.utils.data import DataLoader, Subset\nmodel = DDP(net)\n"
    "share = Subset(d, range(rank, len(d), world))\n"
    "loader = DataLoader(share, shuffle=True)\n",
    "a seed that knows the rank": DIST + "torch.manual_seed(args.seed + dist.get_rank())\n",
    "a split with a seed": DIST
    + "from torch.utils.data import random_split\nseed_everything(1)\ntrain, val = random_split(d, [9, 1])\n",
    "unscaled, under a condition": "import torch\nscaler = torch.amp.GradScaler()\n"
    "def step(loss, model, optimizer, limit):\n"
    "    scaler.scale(loss).backward()\n    if limit:\n        scaler.unscale_(optimizer)\n"
    "        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)\n    scaler.step(optimizer)\n"
    "    scaler.update()\n",
    "clipped in the other arm": "import torch\nscaler = torch.amp.GradScaler()\n"
    "def step(loss, model, optimizer, amp):\n"
    "    if amp:\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n"
    "        scaler.update()\n    else:\n"
    "        loss.backward()\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
    "        optimizer.step()\n",
    "an optimizer before the move and DDP": DIST
    + "def build(net, device):\n    optimizer = torch.optim.SGD(net.parameters(), lr=1)\n    net.to(device)\n"
    "    return DDP(net), optimizer\n",
    "an optimizer that is made anew": "import torch\nfrom torch.distributed.fsdp import fully_shard\ndef build(m):\n"
    "    optimizer = torch.optim.SGD(m.parameters(), lr=1)\n    fully_shard(m)\n"
    "    optimizer = torch.optim.SGD(m.parameters(), lr=1)\n    return optimizer\n",
    "moved, then wrapped": DIST + "def build(net, device):\n    model = net.to(device)\n    model = DDP(model)\n"
    "    return model\n",
    "moved inside the wrap": DIST
    + "def build(net, device, one):\n    if one:\n        net = net.to(device)\n    else:\n        net = DDP(\n"
    "            net.to(device)\n        )\n    return net\n",
    "the inner model to save and to look": in_loop(
        "loss = model(batch).sum()", "loss.backward()", "optimizer.step()", "with torch.no_grad():",
        "    shown = model.module(batch)", "state = model.module.state_dict()",
    ),
    "no_sync around both": DIST
    + "def step(model, batch):\n    with model.no_sync():\n        loss = model(batch)\n        loss.backward()\n",
    "no_sync around a whole step of one's own": "def step(model, batch):\n    with model.no_sync():\n"
    "        forward_backward(batch)\n",
    "zero times what has a gradient": DIST + "loss = loss + 0.0 * sum(p.sum() for p in model.parameters())\n",
    "a detached number to print": DIST + "shown = loss.detach() * 0.5\nloss.backward()\n",
    "a detached target": DIST + "target = teacher(x).detach()\nloss = (student(x) - target).sum()\nloss.backward()\n",
    "spawn where torchrun did not start it": "import os\nimport torch.multiprocessing as mp\n"
    "if 'LOCAL_RANK' in os.environ:\n"
    "    run(int(os.environ['LOCAL_RANK']))\nelse:\n    mp.spawn(run, nprocs=2)\n",
    "spawn that sets the variable": "import os\nimport torch.multiprocessing as mp\ndef run(index):\n"
    "    os.environ['LOCAL_RANK'] = str(index)\n    train(int(os.environ['LOCAL_RANK']))\nmp.spawn(run, nprocs=2)\n",
    "saved by rank 0, in a function": DIST
    + "model = DDP(net)\ndef save():\n    torch.save(model.state_dict(), 'x')\nif dist.get_rank() == 0:\n    save()\n",
    "saved by rank 0, by a guard": DIST
    + "model = DDP(net)\ndef save():\n    if not is_main():\n        return\n"
    "    torch.save(model.state_dict(), 'x')\nsave()\n",
    "saved by each to its own file": DIST + "model = DDP(net)\ntorch.save(model.state_dict(), f'model_{rank}.pt')\n",
    "saved to memory": DIST + "import io\nmodel = DDP(net)\nb = io.BytesIO()\ntorch.save(model.state_dict(), b)\n",
    "saved by a script of one process": "import torch\ntorch.save(model.state_dict(), 'model.pt')\n",
    "saved by another file's main process": DIST
    + "model = DDP(net)\ndef save_checkpoint(path):\n    torch.save(model.state_dict(), path)\n",
    "a scaler's state": DIST + "model = DDP(net)\nscaler.load_state_dict(torch.load(path))\n",
    "a table of names": "RENAMED = {'NCCL_BLOCKING_WAIT': 'TORCH_NCCL_BLOCKING_WAIT'}\n",
    "finally without other ranks": DIST + "try:\n    main()\nfinally:\n    writer.close()\n",
    "the flags the right way round": DIST
    + "dist.all_reduce(skip, op=dist.ReduceOp.MAX)\nif skip:\n    go()\n"
    "dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)\nif is_finite:\n    go()\n",
    "join that throws": DIST
    + "model = DDP(net)\nwith model.join(throw_on_early_termination=True):\n    dist.all_reduce(x)\n",
    "a path that is joined": DIST + "with os.path.join(a, b):\n    dist.all_reduce(x)\n",
    "a file that only rank 0 looks for": DIST
    + "if rank == 0 and not os.path.exists(p):\n    build(p)\ndist.barrier()\n",
    "an empty file": "",
    "one with nothing of torch": "for batch in loader:\n    if batch is None:\n        continue\n    work(batch)\n",
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_said(case: str) -> None:
    assert check("train.py", RIGHT[case]) == []
