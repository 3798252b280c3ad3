"""Trains while workers of two loaders are running, and ends in the given way: ``HOW LOADER``."""

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

from hpcaccel import Accelerator

how, kind = sys.argv[1:3]
first = os.environ.get("HPCACCEL_ATTEMPT", "1") == "1"


class Data(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), index / 64)


accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Data(), batch_size=4, num_workers=1, persistent_workers=kind == "persistent")
own = DataLoader(Data(), batch_size=4, num_workers=1, persistent_workers=kind == "persistent")  # never prepared
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
held = iter(own)
for _ in accelerator.epochs(2):
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.step == 3 and first:
            print("at step 3", flush=True)
            next(held)
            if how == "raise":
                raise ValueError("as told")
            if how == "exit":
                sys.exit(3)
            if how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            if how == "group":
                os.killpg(0, signal.SIGTERM)
            if how == "rank":
                os.kill(os.getpid(), signal.SIGUSR2)
        if how == "wait" and first:
            time.sleep(1.5)  # time for the test to stop it, on a busy machine too
        accelerator.checkpoint()
if first:
    next(held)  # its workers are still running
print("through at", f"{time.time():.1f}", flush=True)
