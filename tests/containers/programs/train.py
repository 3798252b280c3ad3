import os
import sys

import torch
from torch import nn

import hpcaccel
from hpcaccel import Accelerator

assert not os.path.exists("/work"), "the root is the host's"
accelerator = Accelerator(cpu=True)
model, optimizer = nn.Linear(2, 1), None
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.resume()
for _ in range(3):
    loss = model(torch.ones(4, 2)).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state()
print("rank", accelerator.process_index, "of", accelerator.num_processes, os.getcwd(), os.environ["GREETING"])
print("hpcaccel", hpcaccel.__file__, "python", sys.executable)
