"""Gradient accumulation with gradient clipping."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=4)
set_seed(0)
x = torch.randn(16 * accelerator.num_processes, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * accelerator.num_processes, gamma=0.5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

steps = 0
for _ in range(3):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                assert torch.isfinite(norm)
                steps += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
accelerator.print(steps, "steps, learning rate", scheduler.get_last_lr()[0])
