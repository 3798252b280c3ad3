import argparse
from typing import Any

import torch

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--aside", default="")
aside = parser.parse_args().aside
accelerator = Accelerator()
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
for step in accelerator.steps(4):
    torch.manual_seed(step)
    accelerator.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.checkpoint()
    if aside and step == 1:
        accelerator.save_state(aside)
weights: Any = accelerator.unwrap_model(model).weight
print("weights", [float(value).hex() for value in weights.flatten()])
