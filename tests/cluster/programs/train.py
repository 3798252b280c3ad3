"""The training of the scenarios: a small net with dropout on shuffled data, slow enough to be interrupted.

Its output shows how far it is: ``starting`` before torch is imported, ``ready`` when the process group is formed,
``saving`` in the middle of a slow save, ``digest`` of the final weights.
"""

import argparse
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--pause", type=float, default=0.0, help="seconds a step, in the first attempt only")
parser.add_argument("--start-pause", type=float, default=0.0, help="seconds before torch is imported, likewise")
parser.add_argument("--save-pause", type=float, default=0.0, help="seconds that each save takes longer, likewise")
parser.add_argument("--always", action="store_true", help="pause in all attempts")
parser.add_argument("--while-there", type=Path, help="pause in all attempts, as long as this file exists")
args = parser.parse_args()
first = args.always or os.environ["HPCACCEL_ATTEMPT"] == "1"
print("starting", os.getpid(), flush=True)
time.sleep(args.start_pause if first else 0)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from hpcaccel import Accelerator  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


class SlowToSave:
    def state_dict(self) -> dict[str, int]:
        print("saving", flush=True)
        time.sleep(args.save_pause if first else 0)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


torch.manual_seed(0)
x = torch.randn(320, 16)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
accelerator = Accelerator()
model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(SlowToSave())
accelerator.resume()
print("ready", os.getpid(), flush=True)
for _ in accelerator.epochs(args.epochs):
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.detach()})
        accelerator.checkpoint()
        time.sleep(args.pause if first or (args.while_there and args.while_there.exists()) else 0)
total = torch.zeros((), dtype=torch.int64)
for value in accelerator.unwrap_model(model).state_dict().values():
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    total = total * 31 + value.flatten().contiguous().view(torch.int32).long().sum()
if accelerator.is_main_process:
    print("digest", int(total), flush=True)
