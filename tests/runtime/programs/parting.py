"""A training in which one rank leaves the others in the given way: ``--how --rank --strategy``."""

import argparse
import os
import signal
import sys
import time

os.environ.setdefault("HPCACCEL_HEARTBEAT_SECONDS", "0.2")

import torch

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="exit")
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--verbs", type=int, default=1)
parser.add_argument("--at", type=int, default=10)
args = parser.parse_args()
first = os.environ.get("HPCACCEL_ATTEMPT", "1") == "1"


def train(accelerator, model, optimizer, loader):
    # With hpcaccel's verbs, or as in a script with Accelerate's names.
    for step, batch in zip(accelerator.steps(args.steps), loader, strict=False) if args.verbs else enumerate(loader):
        if step == args.steps:
            break
        parts = first and step == args.at and accelerator.process_index == args.rank
        if parts:
            print("parting", flush=True)
        if parts and args.how == "exit":
            sys.exit(0)
        if parts and args.how == "break":
            break  # as told
        if parts and args.how == "return":
            return
        if parts and args.how == "exception":
            raise ValueError("as told")
        if parts and args.how == "os_exit":
            os._exit(0)
        if parts and args.how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)  # Slurm continues a stopped process before it ends it
        if parts and args.how == "evaluation":
            time.sleep(1000)
        loss = model(batch).square().mean()
        if parts and args.how == "skip":
            continue
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        many = 3 if parts and args.how == "shapes" else 2
        accelerator.gather(torch.ones(many, device=accelerator.device))
        if args.verbs:
            accelerator.checkpoint()


accelerator = Accelerator(strategy=args.strategy)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.ones(4096, 8), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
train(accelerator, model, optimizer, loader)
