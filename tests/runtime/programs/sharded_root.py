"""When FSDP2 frees the outermost module's gathered parameters: not before a backward pass, but after a pass without
gradients, also where one comes between a forward and its backward pass.

Prints, per value of reshard_after_forward, whether each parameter of the block and of the outermost module is sharded
after a forward pass with gradients and after one without, and the difference of the gradients from the plain model's.
"""

import json

import torch
from torch import nn

from hpcaccel import Accelerator, FullyShardedDataParallelPlugin


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def sharded(model):
    return [hasattr(model.blocks[0][0].weight, "full_tensor"), hasattr(model.out.weight, "full_tensor")]


found = {}
for reshard in (True, False):
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(reshard_after_forward=reshard))
    torch.manual_seed(0)
    model = Net()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    model = accelerator.prepare(model)
    x = torch.arange(8.0).reshape(2, 4) / 8
    loss = model(x).sum()
    with_gradients = sharded(model)
    with torch.no_grad():
        model(x)
    without = sharded(model)
    loss.backward()
    plain(x).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    difference = max((own.grad.full_tensor() - other.grad).abs().max().item() for own, other in pairs)
    found[str(reshard)] = {"with": with_gradients, "without": without, "difference": difference}
    accelerator.end_training()
accelerator.print(json.dumps(found))
