"""Trains with dropout and shuffled data; the first attempt kills one of its ranks after a given step. Files of
checkpoints that a rank opens for reading are printed at its end."""

import argparse
import json
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--kill-rank", type=int, default=0)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--pause", type=float, default=0.0)
args = parser.parse_args()

opened: list[str] = []


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and "/checkpoints/step_" in str(arguments[0]):
        opened.append(str(arguments[0]).rpartition("/")[2])


sys.addaudithook(note)
first = os.environ.get("HPCACCEL_ATTEMPT", "1") == "1"
rank = int(os.environ.get("RANK", 0))
accelerator = Accelerator(deterministic=True, strategy="fsdp" if args.fsdp else "ddp")
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Linear(32, 1))
data = TensorDataset(torch.randn(400, 8))
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)

for _ in accelerator.epochs(1000):
    for (x,) in loader:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean")})
        accelerator.checkpoint()
        time.sleep(args.pause if first else 0)
        if first and accelerator.step == args.kill_at and rank == args.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if accelerator.step >= args.steps:
            break
    if accelerator.step >= args.steps:
        break
accelerator.end_training()
print(json.dumps({"opened": opened}), flush=True)
