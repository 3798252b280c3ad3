"""Trains a small GPT on the source of Python's standard library, byte by byte.

A plain PyTorch script: the lines marked with ``#:`` are all it takes to run on any number of GPUs and to resume
exactly where it was stopped. Try it alone with ``python train.py --epochs 1``.
"""

import argparse
import math
import time

import torch
from model import GPT
from text import Windows, standard_library
from torch.utils.data import DataLoader

from hpcaccel import Accelerator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
parser.add_argument("--depth", type=int, default=4, help="number of blocks")
parser.add_argument("--width", type=int, default=128, help="embedding size")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--context", type=int, default=128, help="context length in bytes")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--batch", type=int, default=16, help="windows per batch and rank")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--bytes", type=int, default=620_000, help="number of bytes of text to use")
args = parser.parse_args()


def learning_rate(done: float) -> float:
    """A short warm-up, then half a cosine. ``done`` is the part of the training that is over, from 0 to 1."""
    return args.lr * min(1.0, (done + 0.01) / 0.05) * (0.55 + 0.45 * math.cos(math.pi * done))


accelerator = Accelerator()  #:
model = GPT(depth=args.depth, width=args.width, heads=args.heads, context=args.context, dropout=args.dropout)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
data = Windows(standard_library(args.bytes), args.context)
loader = DataLoader(data, batch_size=args.batch, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  #:

total_steps = args.epochs * len(loader)
tokens_per_step = args.batch * args.context * accelerator.num_processes

for epoch in accelerator.epochs(args.epochs):  #:
    accelerator.print(f"epoch {epoch + 1} of {args.epochs}")
    for tokens, targets in loader:
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(accelerator.step / total_steps)

        loss = model(tokens, targets)
        accelerator.backward(loss)  #:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        seconds = time.perf_counter() - started
        accelerator.log({"loss": loss, "tokens_per_second": tokens_per_step / seconds})
        accelerator.checkpoint()  #:

accelerator.print(f"done after {accelerator.step} steps")
