"""Train for a few steps, and write when rank 0 has begun, imported, joined the group and taken its first step.

With ``--hpcaccel`` the loop is hpcaccel's, else it is plain PyTorch under ``srun``.
"""

import json
import os
import sys
import time

times = {"begun": time.time()}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 3


def note(path: str) -> None:
    with open(f"{path}.part", "w") as file:
        json.dump(times, file)
    os.replace(f"{path}.part", path)


def train_with_hpcaccel(path: str) -> None:
    from hpcaccel import Accelerator

    times["imported"] = time.time()
    accelerator = Accelerator(cpu=True)
    times["formed"] = time.time()
    model = nn.Linear(16, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.resume()
    for _ in range(STEPS):
        accelerator.backward(model(torch.ones(8, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process and "stepped" not in times:
            times["stepped"] = time.time()
            note(path)
        accelerator.checkpoint()


def train_plainly(path: str) -> None:
    times["imported"] = time.time()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(20000 + int(os.environ["SLURM_JOB_ID"]) % 20000)
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    times["formed"] = time.time()
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(torch.ones(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and "stepped" not in times:
            times["stepped"] = time.time()
            note(path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, *flags = sys.argv[1:]
    (train_with_hpcaccel if flags == ["--hpcaccel"] else train_plainly)(path)
