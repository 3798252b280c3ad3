"""A program that ends while persistent workers of a prepared loader wait for their next epoch: ``main`` or ``thread``.

In a thread other than the main one, the Accelerator cannot install signal handlers.
"""

import sys
import threading

import torch
from torch.utils.data import DataLoader

from hpcaccel import Accelerator

loader = None  # kept until the program ends


def train():
    global loader
    data = torch.arange(8.0)
    loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True))
    print(sum(batch.sum().item() for batch in loader), flush=True)


if sys.argv[1] == "thread":
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
else:
    train()
