"""Warm-up and decay as in transformers, with lengths multiplied by the number of processes."""

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
WARM_UP, TOTAL = 2 * accelerator.num_processes, 6 * accelerator.num_processes


def factor(step):
    return step / WARM_UP if step < WARM_UP else max(0.0, (TOTAL - step) / (TOTAL - WARM_UP))


model = nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
rates = []
for _ in range(6):
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    rates.append(scheduler.get_last_lr()[0])
accelerator.print(rates)
