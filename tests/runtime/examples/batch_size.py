"""``find_executable_batch_size``: the largest batch that fits in memory."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

accelerator = Accelerator()


@find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=None)
def train(batch_size):
    accelerator.free_memory()
    if batch_size > 20 and accelerator.process_index == 0:
        raise RuntimeError("CUDA out of memory.")
    return batch_size


found = train()
sizes = accelerator.gather(torch.tensor([found]))
accelerator.print("agreed on one that fits:", len(set(sizes.tolist())) == 1 and found <= 20)
