"""An endless training whose saves take two seconds."""

import time

import torch

from hpcaccel import Accelerator


class SlowToSave:
    def state_dict(self):
        time.sleep(2.0)
        return {}

    def load_state_dict(self, state):
        pass


accelerator = Accelerator()
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.register_for_checkpointing(SlowToSave())
for _ in accelerator.steps(100_000):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    accelerator.checkpoint()
