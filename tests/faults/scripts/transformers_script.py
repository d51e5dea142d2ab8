"""A Hugging Face Trainer that knows nothing of safetrain. ``--fault NAME --culprit RANK``: what goes wrong there."""

import argparse
import os
import signal
import time

import torch
from transformers import Trainer, TrainingArguments

FAULT_AT = 5


class Data(torch.utils.data.Dataset):
    def __init__(self, fault):
        self.fault = fault
        self.taken = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.taken += 1
        if self.taken == FAULT_AT * 4:
            if self.fault == "raise":
                raise ValueError("bad label 12")  # line: raise
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "sleep":
                time.sleep(1000)  # line: sleep
            if self.fault == "alone":
                torch.distributed.barrier()  # line: alone
        return {"x": torch.ones(4)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--output", default="trainer_output")
    args = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=args.output, per_device_train_batch_size=4, num_train_epochs=2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    fault = args.fault if arguments.process_index == args.culprit else ""
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Data(fault))
    trainer.train()  # line: train
    print(f"done: {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
