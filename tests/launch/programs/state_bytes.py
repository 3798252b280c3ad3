"""One training step under DDP or FSDP2; rank 0 prints the bytes of parameters, gradients and optimizer state it stores.

Usage: ``state_bytes.py ddp|fsdp no|bf16``
"""

import json
import sys

import torch
from torch.distributed.tensor import DTensor

from hpcaccel import Accelerator
from hpcaccel.utils import FullyShardedDataParallelPlugin


class Net(torch.nn.Module):
    """Odd sizes, so that shards are padded; a buffer; a block that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(33, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 7)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden).relu()
        return self.head(hidden)


def nbytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def main(strategy: str, precision: str) -> None:
    plugin = FullyShardedDataParallelPlugin() if strategy == "fsdp" else None
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=precision)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.arange(4, device=accelerator.device)).sum())
    optimizer.step()
    parameters = list(model.parameters())
    found = {
        "parameters": sum(map(nbytes, [*parameters, *model.buffers()])),
        "gradients": sum(nbytes(one.grad) for one in parameters),
        "optimizer": sum(nbytes(value) for state in optimizer.state.values() for value in state.values()),
    }
    if accelerator.is_main_process:
        print(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:3])
