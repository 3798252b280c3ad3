"""Attributes of the Accelerator, a prepared optimizer and scheduler that a script sets or reads, on two ranks."""

import json
from typing import Any

import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.utils import DistributedDataParallelKwargs

accelerator = Accelerator(gradient_accumulation_steps=2)
found = {}

before = accelerator.prepare(nn.Linear(2, 2))
accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
after = accelerator.prepare(nn.Linear(2, 2))
found["ddp"] = [after.find_unused_parameters, before.find_unused_parameters]
accelerator.free_memory()

accelerator.check_trigger()
if accelerator.process_index == 1:
    accelerator.set_trigger()
set_here = accelerator.gather(accelerator.flag_tensor).tolist()
answers = accelerator.gather(torch.tensor([accelerator.check_trigger()])).tolist()
found["triggers"] = [set_here, answers, accelerator.gather(accelerator.flag_tensor).tolist()]

model: Any = nn.Linear(2, 2)
optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
schedule: Any = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)


def micro_batch():
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        assert optimizer.gradient_state.sync_gradients is schedule.gradient_state.sync_gradients
        assert optimizer.gradient_state.sync_gradients is accelerator.sync_gradients
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return schedule.get_last_lr()[0]


rates = found["rates"] = {}
assert (schedule.split_batches, schedule.step_with_optimizer) == (False, True)
micro_batch()
rates["per process"] = micro_batch()
schedule.split_batches = True
micro_batch()
rates["split"] = micro_batch()
schedule.step_with_optimizer = False
rates["every call"] = micro_batch()
state = optimizer.accelerator_state
found["states"] = [str(state.distributed_type), state.num_processes, optimizer.device_placement]
if accelerator.is_main_process:
    print(json.dumps(found), flush=True)
accelerator.end_training()
