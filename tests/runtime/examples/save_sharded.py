"""The weights of a sharded model, saved whole."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

folder = sys.argv[1]
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(2, 4)).mean())
optimizer.step()

state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.save(state, f"{folder}/model.pt")
accelerator.wait_for_everyone()
loaded = torch.load(f"{folder}/model.pt", weights_only=True)
accelerator.print({name: list(value.shape) for name, value in loaded.items()})
