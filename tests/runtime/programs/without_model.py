"""Optimizers whose models are not prepared, prepared later, wrapped by the script, or frozen. Only the first is a
mistake. Each rank prints the differences between the ranks' weights in the first case."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcaccel import Accelerator

accelerator = Accelerator(cpu=True)


def train(case):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if case == "frozen":
        model.requires_grad_(False)
    if case == "wrapped":
        model = DistributedDataParallel(model)
    optimizer = accelerator.prepare(optimizer)
    if case == "later":
        model = accelerator.prepare(model)
    if case == "compiled later":
        model = accelerator.prepare(torch.compile(model, backend="eager"))
    for _ in range(2):
        if case != "frozen":
            accelerator.backward(model(torch.full((1, 2), accelerator.process_index + 1.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
    weight = next(iter(model.parameters())).detach().flatten()
    spread = float((accelerator.gather(weight[:1]) - weight[0]).abs().max())
    accelerator.free_memory()
    return spread


print({case: train(case) > 0 for case in ("alone", "later", "compiled later", "wrapped", "frozen")}, flush=True)
accelerator.end_training()
