"""fp16 with a scaler under DDP and FSDP2: an overflow on one rank skips the step on all; bf16 outputs."""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.runtime.handlers import GradScalerKwargs


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(strategy):
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=100)],
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    for step in range(3):
        x = torch.ones(2, 4)
        if step == 1 and accelerator.process_index == 1:
            x = x * 1e30  # only this rank's gradients overflow
        before = [full(p.detach()).clone() for p in model.parameters()]
        out = model(x)
        assert out.dtype == torch.float32
        accelerator.backward(out.sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after = [full(p.detach()).clone() for p in model.parameters()]
        changed = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert all(bool(torch.isfinite(tensor).all()) for tensor in after)
        skipped = accelerator.optimizer_step_was_skipped
        assert changed != skipped
        flags: list[Any] = [None] * accelerator.num_processes
        if accelerator.num_processes > 1:
            dist.all_gather_object(flags, skipped)
        else:
            flags = [skipped]
        seen.append(flags)
    scale = accelerator.scaler.get_scale()
    accelerator.end_training()
    return [seen, scale]


print(json.dumps({strategy: trained(strategy) for strategy in sys.argv[1:] or ("ddp", "fsdp")}), flush=True)
