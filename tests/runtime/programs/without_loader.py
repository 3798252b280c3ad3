"""A script with Accelerate's names only and no prepared loader: only ``backward`` shows that a step has ended."""

import argparse
import json
import os
import signal

import torch
from torch import nn

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["one", "two", "rare"], default="one")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--kill-at", type=int, default=-1)
args = parser.parse_args()

STEPS = 12
accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, step_scheduler_per_process=False)
models = [nn.Linear(4, 4).double() for _ in range(1 if args.mode == "one" else 2)]
optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
prepared = accelerator.prepare(*models, *optimizers, *schedulers)
count = len(models)
models, optimizers, schedulers = prepared[:count], prepared[count : 2 * count], prepared[2 * count :]


class Position:
    """The script's own position in its loop."""

    iteration = 0

    def state_dict(self):
        return {"iteration": self.iteration}

    def load_state_dict(self, state):
        self.iteration = state["iteration"]


position = Position()
accelerator.register_for_checkpointing(position)
if os.environ["HPCACCEL_ATTEMPT"] != "1":
    accelerator.load_state()


def update(number, x):
    with accelerator.accumulate(models[number]):
        accelerator.backward((models[number](x) - number).square().mean())
        accelerator.clip_grad_norm_(models[number].parameters(), 1.0)
        optimizers[number].step()
        schedulers[number].step()
        optimizers[number].zero_grad()


while position.iteration < STEPS * args.accumulate:
    generator = torch.Generator().manual_seed(1000 * position.iteration + accelerator.process_index)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    update(0, x)
    if args.mode == "two" or (args.mode == "rare" and position.iteration % 3 == 2):
        update(1, x)
    position.iteration += 1
    if position.iteration == args.kill_at and accelerator.process_index == 1 and os.environ["HPCACCEL_ATTEMPT"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)

weights = [accelerator.unwrap_model(model).weight.flatten().tolist() for model in models]
accelerator.print(json.dumps({"weights": weights, "lr": [group.get_last_lr() for group in schedulers]}))
