"""Trains a small network to continue a text character by character, and pauses between steps, so that it needs little
of a processor. ``--fault`` makes rank 1 fail or hang at step 90."""

import argparse
import math
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator

TEXT = (argparse.__doc__ or "")[:1200]
FAULT_STEP = 90

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--seconds", type=float, default=0.1, help="pause after each step")
parser.add_argument("--slow", type=float, default=0.0, help="additional pause of rank 1")
parser.add_argument("--fault", choices=["none", "crash", "hang"], default="none")
args = parser.parse_args()


def windows(context: int = 8) -> TensorDataset:
    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(letter) for letter in TEXT])
    inputs = torch.stack([text[start : start + context] for start in range(len(text) - context)])
    return TensorDataset(inputs, text[context:])


def embed(inputs: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    if args.fault == "crash" and rank == 1 and step >= FAULT_STEP:
        inputs = inputs + 100  # tokens that the vocabulary does not have
    return inputs


torch.set_num_threads(1)
accelerator = Accelerator()
rank = accelerator.process_index
model = nn.Sequential(
    nn.Embedding(64, args.width), nn.Flatten(), nn.Dropout(args.dropout),
    nn.Linear(8 * args.width, args.width), nn.GELU(), nn.Linear(args.width, 64),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
loader = DataLoader(windows(), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
total = args.epochs * len(loader)

for epoch in accelerator.epochs(args.epochs):
    accelerator.print(f"epoch {epoch + 1} of {args.epochs}")
    for inputs, targets in loader:
        began = time.perf_counter()
        lr = args.lr * (0.5 + 0.5 * math.cos(math.pi * accelerator.step / total))
        for group in optimizer.param_groups:
            group["lr"] = lr
        if args.fault == "hang" and rank == 1 and accelerator.step >= FAULT_STEP:
            time.sleep(3600)
        scores = model(embed(inputs, rank, accelerator.step))
        loss = nn.functional.cross_entropy(scores, targets)
        accuracy = (scores.argmax(1) == targets).float().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.seconds + (args.slow if rank == 1 else 0.0))
        speed = 64 * accelerator.num_processes / (time.perf_counter() - began)
        values = {"loss": loss, "accuracy": accuracy, "grad_norm": norm, "lr": lr, "tokens_per_second": speed}
        accelerator.log(values)
        accelerator.checkpoint()
    accelerator.print(f"epoch {epoch + 1} is done: loss {loss.item():.3f}, accuracy {accuracy.item():.0%}")
