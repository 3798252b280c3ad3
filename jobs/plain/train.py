"""Plain PyTorch DDP: torchrun's variables, a checkpoint of its own, no import of hpcaccel.

hpcaccel starts it, watches it, and requeues it after a preemption; the script then loads its own checkpoint.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("PLAIN_STEPS", "200"))
# The run directory, which stays the same after a preemption; without hpcaccel, the current directory.
CHECKPOINT = Path(os.environ.get("HPCACCEL_RUN_DIR", ".")) / "plain.pt"

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cuda = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if cuda else torch.device("cpu")
)
dist.init_process_group("nccl" if cuda else "gloo")

torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(16, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
    print(f"rank {rank} continues from step {first}", flush=True)

truth = torch.arange(16.0, device=device) / 16
for step in range(first, STEPS):
    generator = torch.Generator().manual_seed(step * world_size + rank)
    x = torch.randn(32, 16, generator=generator).to(device)
    loss = nn.functional.mse_loss(model(x).squeeze(1), x @ truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 50 == 0 and rank == 0:
        print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, CHECKPOINT.with_suffix(".tmp"))
        CHECKPOINT.with_suffix(".tmp").replace(CHECKPOINT)

dist.barrier()
dist.destroy_process_group()
