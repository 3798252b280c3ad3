"""The trained model as a plain file, written once."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder = sys.argv[1]
accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()

accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
path = os.path.join(folder, "model.pt")
accelerator.save(unwrapped.state_dict(), path)
if accelerator.is_main_process:
    torch.save(unwrapped.state_dict(), os.path.join(folder, "by-hand.pt"))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    fresh = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    fresh.load_state_dict(torch.load(path))
    assert torch.equal(fresh[0].weight, unwrapped[0].weight)
accelerator.print(sorted(os.listdir(folder)))
