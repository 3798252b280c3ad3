"""Attributes and methods of an Accelerator in a training step: settings, profile, clipping, accumulation, fp16."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.handlers import GradScalerKwargs, ProfileKwargs

handler = ProfileKwargs(activities=["cpu"], output_trace_dir=sys.argv[1])
accelerator = Accelerator(gradient_accumulation_steps=3, kwargs_handlers=[handler])
assert accelerator.sync_gradients
assert accelerator.scaler is None
assert accelerator.fp8_backend == "NO"
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=2)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
found = []
with accelerator.profile() as profiler:
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss, retain_graph=True)
                found.append(accelerator.sync_gradients)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                assert norm.item() >= 0
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
assert found == [False, False, True] * 4, found
assert accelerator.step == 4
assert scheduler.last_epoch == 8  # 4 steps, times 2 processes
assert not accelerator.optimizer_step_was_skipped
assert any(event.key == "aten::mse_loss" or "linear" in event.key for event in profiler.key_averages())

accelerator.gradient_accumulation_steps = 1
assert accelerator.gradient_accumulation_steps == 1
try:
    accelerator.gradient_accumulation_steps = 0
except RuntimeMisuse:
    pass
else:
    raise AssertionError("0 micro-batches")
accelerator.sync_gradients = False  # as in a script with its own accumulation
before = [parameter.detach().clone() for parameter in model.parameters()]
accelerator.backward(model(x).sum())
optimizer.step()
assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
accelerator.sync_gradients = True
assert accelerator.gradient_state.sync_gradients

# gradients of a forward pass in no_sync are reduced by a later backward pass
with accelerator.no_sync(model):
    first = model(x).sum() * (accelerator.process_index + 1)
optimizer.zero_grad()
with accelerator.trigger_sync_in_backward(model):
    accelerator.backward(first)
ranks = accelerator.gather(model.module.bias.grad)
assert ranks.tolist() == [3.0, 3.0], ranks  # the mean of 2 and 4

# fp16: gradients are unscaled for clipping; an overflow on one rank skips the step on both
accelerator.end_training()
accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
assert accelerator.scaler.get_scale() == 1024.0
model = nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
with accelerator.autocast():
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
for factor, skipped in ((float("inf") if accelerator.process_index else 1.0, True), (1.0, False)):
    accelerator.backward(model(torch.ones(2, 4)).sum() * factor)
    accelerator.unscale_gradients(optimizer)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped == optimizer.step_was_skipped == skipped
torch.testing.assert_close(norm, torch.tensor(20.0**0.5))
assert accelerator.scaler.get_scale() == 512.0
accelerator.end_training()
