"""A small training with everything that a resume must restore: dropout, shuffling, augmentation, accumulation."""

import argparse
import hashlib
import json
import os
import random
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--samples", type=int, default=50)
parser.add_argument("--kill-at", default="", help="step:rank:signal that a rank and its workers get")
parser.add_argument("--early", default="", help="rank:signal that comes before there is an Accelerator")
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--verbs", choices=["all", "steps", "none"], default="all")
parser.add_argument("--precision", default="no")
args = parser.parse_args()


class Noisy(Dataset):
    """Samples with noise from each of the three global generators."""

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        noise = torch.rand(8) * 0.1 + random.random() * 0.1
        return torch.linspace(0, 1, 8) * index / args.samples + noise, torch.tensor([float(index % 3)])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


if args.early:
    early_rank, early_signal = args.early.split(":")
    if os.environ["RANK"] == early_rank:
        os.kill(os.getpid(), getattr(signal, early_signal))

torch.manual_seed(int(os.environ.get("RANK", 0)))  # as in scripts that seed per rank
accelerator = Accelerator(
    gradient_accumulation_steps=args.accumulate,
    strategy=args.strategy,
    mixed_precision=args.precision,
    deterministic=True,
    step_scheduler_per_process=False,
)
model = nn.Sequential(nn.Linear(8, 16), Block(), nn.Dropout(0.2), Block(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=args.workers)
loader, scheduler, model, optimizer = accelerator.prepare(loader, scheduler, model, optimizer)


def kill_when_told(step):
    if args.kill_at:
        at, rank, number = args.kill_at.split(":")
        if (
            step == int(at)
            and accelerator.process_index == int(rank)
            and os.environ.get("HPCACCEL_ATTEMPT", "1") == "1"
        ):
            os.killpg(0, getattr(signal, number))


def train_on(x, y):
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss, "mean")
    accelerator.log({"loss": mean, "x": accelerator.gather(x).double().sum()})
    kill_when_told(accelerator.step)
    if accelerator.step == args.fail_at:
        raise ValueError("as told")


class Epoch:
    """The state of a script that counts its epochs itself."""

    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def epochs():
    if args.verbs != "none":
        yield from accelerator.epochs(args.epochs)
        return
    own = Epoch()
    accelerator.register_for_checkpointing(own)
    if os.environ.get("HPCACCEL_ATTEMPT", "1") != "1":
        accelerator.load_state()
    while own.number < args.epochs:
        yield own.number
        own.number += 1


if args.verbs == "steps":
    batches = iter(loader)
    for _ in accelerator.steps(12):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        train_on(*batch)
        accelerator.checkpoint()
else:
    for _ in epochs():
        for x, y in loader:
            train_on(x, y)
            if args.verbs == "all":
                accelerator.checkpoint()

weights = {}
for name, tensor in accelerator.unwrap_model(model).state_dict().items():
    weights[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights.values())).hexdigest()
accelerator.print(json.dumps({"digest": digest, "step": accelerator.step, "stopped": accelerator.should_stop()}))
