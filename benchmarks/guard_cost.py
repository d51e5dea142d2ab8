"""What the guard costs a script: CPU time of its threads beside a hand-written DDP loop of some 5 ms a step.

torchrun --nproc-per-node 2 benchmarks/guard_cost.py                       # without
torchrun --nproc-per-node 2 -m safetrain.guard benchmarks/guard_cost.py    # with

The guard's threads are read one by one from the kernel, which is exact on a busy machine too; what it adds to the
script's own thread is a counter in send and recv, of which there are none here.
"""

import argparse
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def cpu_s_of_the_guard() -> float:
    """CPU time so far of the threads of this process that belong to the guard."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("safetrain-")]
    return sum(int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in threads) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--width", type=int, default=512)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(asked.width, asked.width), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, asked.width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(50):
        step()
    began, cpu_before, guard_before = time.perf_counter(), time.process_time(), cpu_s_of_the_guard()
    for _ in range(asked.steps):
        step()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
    guard_s = cpu_s_of_the_guard() - guard_before
    a_step = 1e3 / asked.steps
    print(
        f"rank {os.environ['RANK']}: {wall_s * a_step:.2f} ms a step, {cpu_s * a_step:.2f} ms CPU; the guard's threads "
        f"take {1e3 * guard_s * a_step:.1f} us ({100 * guard_s / wall_s:.2f} % of the step)",
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
