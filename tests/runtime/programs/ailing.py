"""Trains with a slow rank or a rank that hangs, for tests of heartbeats, thread stacks and stragglers."""

import argparse
import ctypes
import os
import signal
import sys
import time

os.environ.setdefault("HPCACCEL_HEARTBEAT_SECONDS", "0.2")

import torch
from torch.nn import functional as F

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--steps", type=int, default=160)
parser.add_argument("--slow", type=int, default=-1, help="the rank that takes longer for its own part")
parser.add_argument("--pause", type=float, default=0.002, help="seconds a step; the slow rank takes three times that")
parser.add_argument("--until", type=int, default=10**9, help="the step after which it is slow no more")
parser.add_argument("--stop", default="", help="step:rank that stops itself, or --how says")
parser.add_argument("--how", choices=["signal", "sleep", "lock"], default="signal")
parser.add_argument("--slow-data", action="store_true", help="the slow rank's time goes into its data")
args = parser.parse_args()
rank, attempt = int(os.environ["RANK"]), int(os.environ["HPCACCEL_ATTEMPT"])
stop_step, stop_rank = map(int, args.stop.split(":")) if args.stop and attempt == 1 else (-1, -1)
step = 0


def pause() -> None:
    time.sleep(args.pause * (3 if rank == args.slow and step < args.until else 1))


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        if args.slow_data:
            pause()
        return torch.full((8,), index / 4096)


def stand_still() -> None:
    if args.how == "signal":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(5)  # the signal that requests the stacks may reach another thread shortly after this one resumes
    while args.how == "lock":
        ctypes.PyDLL(None).sleep(60)  # C code that holds the GIL
    while args.how == "sleep":
        time.sleep(1)


accelerator = Accelerator(strategy=args.strategy)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Data(), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = iter(())
for step in accelerator.steps(args.steps):
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader)
        batch = next(batches)
    if not args.slow_data:
        pause()
    if step == stop_step and rank == stop_rank:
        print("standing still", flush=True)
        stand_still()
    loss = F.mse_loss(model(batch), batch.sum(1, keepdim=True))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.detach()})
    accelerator.checkpoint()
print("done", file=sys.stderr, flush=True)
time.sleep(0.5)
