"""Starts and ends training five times in one script."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

weights = []
for attempt in range(5):
    accelerator = Accelerator(gradient_accumulation_steps=1 + attempt % 2)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
    weights.append(accelerator.unwrap_model(model).weight.sum().item())
    accelerator.end_training()
accelerator.print(len(weights), "times, alike:", weights[0] == weights[2] == weights[4] and weights[1] == weights[3])
