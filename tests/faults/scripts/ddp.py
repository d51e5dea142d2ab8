"""A hand-written DDP loop that knows nothing of safetrain. ``--fault NAME --culprit RANK``: what goes wrong there."""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT_AT = 5


class Numbers(Dataset):
    def __init__(self, sleeps):
        self.sleeps = sleeps

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.sleeps and index > 40:
            time.sleep(1000)  # line: loader
        return torch.full((4,), index / 64)


def validate():
    ended = time.monotonic() + 6
    while time.monotonic() < ended:
        torch.ones(64, 64) @ torch.ones(64, 64)  # line: validate


def train(fault):
    data = Numbers(fault == "loader")
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for _ in range(3):
        for batch in loader:
            step += 1
            if step == FAULT_AT:
                if fault == "skip":
                    continue
                if fault == "early":
                    break  # line: early
                if fault == "raise":
                    raise ValueError("bad label 12")  # line: raise
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "exit":
                    os._exit(3)  # line: exit
                if fault == "alone":
                    dist.barrier()  # line: alone
                if fault == "sleep":
                    time.sleep(1000)  # line: sleep
                if fault == "validate":
                    validate()  # line: calls validate
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()  # line: backward
            optimizer.step()
            if fault == "swapped" and step == FAULT_AT:
                dist.broadcast(torch.ones(3), src=0)  # line: broadcast
                dist.all_reduce(torch.ones(3))  # line: all_reduce
            elif step == FAULT_AT:
                dist.all_reduce(torch.ones(3))  # line: all_reduce first
                dist.broadcast(torch.ones(3), src=0)
        if fault == "early" and step == FAULT_AT:
            return step
    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800)
    args = parser.parse_args()
    import datetime

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    steps = train(args.fault if dist.get_rank() == args.culprit else "")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} done: {steps} steps, {__name__}, {__file__}", flush=True)
    dist.barrier()  # line: end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
