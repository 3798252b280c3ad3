"""Three stages in one script: train, leave the group, unfreeze, prepare again with the same Accelerator.

The arguments: ``ddp`` or ``fsdp``; ``destroy`` or ``end``; a directory for checkpoints. Prints the weights' sums.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator
from hpcaccel.utils import gather_object, set_seed

strategy, way, place = sys.argv[1], sys.argv[2], Path(sys.argv[3])
accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
set_seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
for parameter in model[0].parameters():
    parameter.requires_grad_(False)
data = TensorDataset(torch.arange(32.0).reshape(8, 4) / 32, torch.arange(8.0)[:, None])
raw_loader = DataLoader(data, batch_size=2)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
loader = raw_loader
sums = []
for stage in range(3):
    if stage == 1:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # The last stage uses the objects that the stage before prepared.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.gradient_accumulation_steps == 2
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.step == 1, accelerator.step
    whole = accelerator.get_state_dict(model)
    sums.append({name: float(value.double().sum()) for name, value in whole.items()})
    where = accelerator.save_state(place / f"stage{stage}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(where)
    whole = accelerator.get_state_dict(model)
    assert {name: float(value.double().sum()) for name, value in whole.items()} == sums[-1]
    rank = torch.tensor([accelerator.process_index])
    assert accelerator.gather(rank).tolist() == list(range(accelerator.num_processes))
    assert gather_object([stage]) == [stage] * accelerator.num_processes
    accelerator.wait_for_everyone()
    if way == "destroy":
        accelerator.destroy_process_group()
    else:
        accelerator.end_training()
    model_after = accelerator.unwrap_model(model)
    assert isinstance(model_after, nn.Sequential)
if accelerator.is_main_process:
    print(json.dumps({"sums": sums}), flush=True)
