"""A small residual network with DeepSpeed's engine: ZeRO stage 3, as ds_config.json says.

$ hpcaccel submit jobs/zero/job.yaml
$ DS_ACCELERATOR=cpu ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_CONFIG_FILE=ds_config.json \\
    torchrun --nproc-per-node=2 train.py --width 32 --epochs 1
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--depth", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.body(x))


accelerator = Accelerator(seed=0)
x = torch.randn(512, 16)
loader = DataLoader(TensorDataset(x, x.square().sum(1)), batch_size=16, shuffle=True)
model = nn.Sequential(
    nn.Linear(16, args.width), *(Block(args.width) for _ in range(args.depth)), nn.Linear(args.width, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in accelerator.epochs(args.epochs):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.checkpoint()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"epoch {epoch}: step {accelerator.step}, loss {mean:.4f}")
