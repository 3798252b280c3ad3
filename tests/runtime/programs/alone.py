"""Trains, and evaluates on a prepared loader on rank 0 alone after each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator

accelerator = Accelerator(cpu=True)
data = TensorDataset(torch.arange(8.0).reshape(8, 1))
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train, both, evaluation = (DataLoader(data, batch_size=2, shuffle=True) for _ in range(3))
model, optimizer, train, both, evaluation = accelerator.prepare(model, optimizer, train, both, evaluation)
for _ in range(3):
    for (x,) in train:
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    seen = sum(len(x) for (x,) in both)
    if accelerator.is_main_process:
        with torch.no_grad():
            seen = sum(len(model(x)) for (x,) in evaluation)
        print(f"saw {seen}", flush=True)
