"""A loop with Accelerate that knows nothing of safetrain. ``--fault NAME --culprit RANK``: what goes wrong there."""

import argparse
import os
import signal
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

FAULT_AT = 5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--culprit", type=int, default=1)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    fault = args.fault if accelerator.process_index == args.culprit else ""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for step, (batch,) in enumerate(loader):
            if step == FAULT_AT:
                if fault == "skip":
                    continue
                if fault == "raise":
                    raise ValueError("bad label 12")  # line: raise
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "sleep":
                    time.sleep(1000)  # line: sleep
                if fault == "alone":
                    accelerator.wait_for_everyone()  # line: alone
            loss = model(batch).square().mean()
            accelerator.backward(loss)  # line: backward
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print("done")
    accelerator.end_training()


if __name__ == "__main__":
    main()
