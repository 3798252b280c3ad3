"""A script that calls transformers' Trainer and does not mention hpcaccel."""

import sys
import time

import torch
from transformers import Trainer, TrainingArguments


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.06)
        x = torch.full((4,), float(index % 7))
        return {"x": x, "labels": x.sum()[None]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


args = TrainingArguments(
    sys.argv[1],
    max_steps=60,
    per_device_train_batch_size=4,
    save_strategy="no",
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(Model(), args, train_dataset=Data())
trainer.train()
print("trained to step", trainer.state.global_step, flush=True)
