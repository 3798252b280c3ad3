"""Trains five times in one process, each time with a new process group, alternately with DDP and FSDP."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.states.accelerator_state import AcceleratorState
from hpcaccel.runtime.states.partial_state import PartialState

sums, types = [], []
for turn in range(5):
    accelerator = Accelerator(cpu=True, strategy="fsdp" if turn % 2 else "ddp", seed=3)
    types.append(str(accelerator.distributed_type))
    assert str(PartialState().distributed_type) == types[-1]
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), step + accelerator.process_index + 1.0)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
    losses = accelerator.gather(loss.detach())
    sums.append(round(losses.sum().item(), 6))
    if turn == 0:
        accelerator.end_training()
    elif turn == 1:
        accelerator.destroy_process_group()
    elif turn == 2:
        PartialState().destroy_process_group()
    else:
        AcceleratorState().destroy_process_group()
    assert not dist.is_initialized()
    accelerator.print(f"turn {turn} of {accelerator.num_processes}")
    assert isinstance(accelerator.unwrap_model(model), torch.nn.Sequential)
if os.environ.get("RANK", "0") == "0":
    print(json.dumps({"sums": sums, "types": types}))
