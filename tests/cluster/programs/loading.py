"""A program without hpcaccel that reads more from a data loader with workers after SIGTERM, like one that saves."""

import os
import signal
import sys
import time
from types import FrameType

from torch.utils.data import DataLoader, Dataset

if os.environ["HPCACCEL_ATTEMPT"] != "1":
    sys.exit()

asked = False


def on_term(number: int, frame: FrameType | None) -> None:
    global asked
    asked = True


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


signal.signal(signal.SIGTERM, on_term)
after = 0
for number, _ in enumerate(DataLoader(Slow(), batch_size=2, num_workers=2, persistent_workers=True)):
    if number == 5:
        print("loading", flush=True)
    after += asked
    if after == 20:  # many more than the workers had ready
        break
print(f"saved after {after} more batches", flush=True)
