"""A Lightning Trainer that knows nothing of safetrain. ``--fault NAME --culprit RANK``: what goes wrong there."""

import argparse
import os
import signal
import time

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

FAULT_AT = 5


class Model(lightning.LightningModule):
    def __init__(self, fault, culprit):
        super().__init__()
        self.fault, self.culprit = fault, culprit
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        if index == FAULT_AT and self.global_rank == self.culprit:
            if self.fault == "skip":
                return None  # line: skip
            if self.fault == "raise":
                raise ValueError("bad label 12")  # line: raise
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "sleep":
                time.sleep(1000)  # line: sleep
            if self.fault == "alone":
                self.trainer.strategy.barrier("mine")  # line: alone
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--culprit", type=int, default=1)
    args = parser.parse_args()
    trainer = lightning.Trainer(
        strategy="ddp", accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
    trainer.fit(Model(args.fault, args.culprit), data)  # line: fit
    print(f"done: {trainer.global_step} steps")


if __name__ == "__main__":
    main()
