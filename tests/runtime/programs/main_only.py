"""With a sharded model, rank 0 alone makes a call that needs all ranks, while the others go on training."""

import sys

import torch
from torch import nn

from hpcaccel import Accelerator

call, folder = sys.argv[1:]
accelerator = Accelerator(strategy="fsdp", cpu=True)
model = nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train():
    accelerator.backward(model(torch.ones(2, 4)).sum())


if accelerator.is_main_process:
    if call == "save":
        accelerator.save(accelerator.unwrap_model(model).state_dict(), folder + "/x.pt")
    if call == "save_model":
        accelerator.save_model(model, folder + "/model")
    if call == "get_state_dict":
        accelerator.get_state_dict(model)
    if call == "save_state":
        accelerator.save_state()
    if call == "load_state":
        accelerator.load_state()
train()
print("went on", flush=True)
