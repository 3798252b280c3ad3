"""Trains with dropout on any kind of loader, and kills itself at a given step in the first attempt."""

import argparse
import os
import signal

import torch
from torch import nn

from hpcaccel import Accelerator, DataLoaderConfiguration
from tests.runtime.loader_kinds import KINDS

parser = argparse.ArgumentParser()
parser.add_argument("--kind", default="stream")
parser.add_argument("--dispatch", action="store_true")
parser.add_argument("--bookmark", type=float, default=None, help="seconds between two states of a stream")
parser.add_argument("--kill-at", type=int, default=-1, help="a step after which the first attempt is killed")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

first = os.environ.get("HPCACCEL_ATTEMPT", "1") == "1"
kind = KINDS[args.kind]
torch.manual_seed(int(os.environ.get("RANK", 0)))
configuration = DataLoaderConfiguration(
    dispatch_batches=True if args.dispatch else None, use_stateful_dataloader=kind.options.get("stateful", False)
)
accelerator = Accelerator(deterministic=True, dataloader_config=configuration)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), kind.make())
if args.bookmark is not None:
    loader.bookmark_seconds = args.bookmark

for _ in accelerator.epochs(args.epochs):
    for batch in loader:
        loss = model(batch.float()).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        shown = {"loss": accelerator.reduce(loss.detach(), "mean"), "x": accelerator.gather(batch).sum()}
        accelerator.log(shown)
        accelerator.checkpoint()
        if first and accelerator.step == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
