import signal
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

asked: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))


class Slow(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.tensor(index)


loader = DataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True)
batches: Any = iter(loader)
after = 0
print("ready", *(worker.pid for worker in batches._workers), flush=True)
while after < 20:  # far more batches than the workers prefetch
    next(batches)
    after += bool(asked)
print("saved", flush=True)
