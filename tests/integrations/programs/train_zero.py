"""The four-line script with DeepSpeed's engine; a JSON object on the command line says what it does."""

import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator

how = json.loads(sys.argv[1])
if how.get("standin"):
    from tests.runtime.programs import deepspeed_standin

    deepspeed_standin.install()


def no_space(*args, **kwargs):
    raise OSError("no space")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 1)
        self.register_buffer("scale", torch.full((1,), float(torch.rand(1))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).squeeze(1)


def plugin():
    from hpcaccel import DeepSpeedPlugin

    return DeepSpeedPlugin(**how["plugin"]) if "plugin" in how else None


accelerator = Accelerator(
    deepspeed_plugin=plugin(),
    project_dir=how.get("project"),
    gradient_accumulation_steps=how.get("micro_batches", 1),
    mixed_precision=how.get("precision"),
    step_scheduler_per_process=False,
)
torch.manual_seed(1 + accelerator.process_index)  # the ranks must get rank 0's weights
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(3))
loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))
model = Net()
if how.get("dummies"):
    from hpcaccel.utils import DummyOptim, DummyScheduler

    optimizer: Any = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler: Any = DummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=4)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses, norms, rates = {}, {}, {}
started = accelerator.resume()
first = accelerator.step
for _ in accelerator.epochs(how.get("epochs", 1)):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients and how.get("clip"):
                norms[accelerator.step] = float(accelerator.clip_grad_norm_(model.parameters(), how["clip"]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        losses.setdefault(accelerator.step, []).append(mean)
        rates[accelerator.step] = optimizer.param_groups[0]["lr"]
        if accelerator.sync_gradients and accelerator.step in how.get("saves", ()):
            if accelerator.step == how.get("die_in_save") and accelerator.process_index == 1:
                torch.save = lambda *args, **kwargs: os._exit(9)
            if accelerator.step == how.get("full_disk") and accelerator.process_index == 1:
                torch.save = no_space
            accelerator.save_state()
        if accelerator.step == how.get("terminate") != first and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        accelerator.checkpoint()
whole = accelerator.get_state_dict(model)
if how.get("export"):
    accelerator.save_model(model, how["export"])
if accelerator.is_main_process:
    total = {name: float(value.float().abs().sum()) for name, value in whole.items()}
    print(
        json.dumps(
            {
                "first": first,
                "resumed": str(started.path),
                "losses": losses,
                "norms": norms,
                "rates": rates,
                "weights": total,
                "type": str(accelerator.distributed_type),
                "precision": accelerator.mixed_precision,
                "native_amp": [accelerator.native_amp, accelerator.autocast()._enabled],
                "states": [
                    str(optimizer.accelerator_state.distributed_type),
                    optimizer.gradient_state.num_steps,
                    scheduler.gradient_state.num_steps,
                    optimizer.device_placement,
                ],
                "model": type(accelerator.unwrap_model(model)).__name__,
                "arguments": sys.argv[2:],
            }
        ),
        flush=True,
    )
accelerator.end_training()
