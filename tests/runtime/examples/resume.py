"""A training stopped in the middle of an epoch and resumed with the remaining samples."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STOP_AFTER = 3


def train(stop_after=None, resume_from=None):
    accelerator = Accelerator()
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.arange(12.0 * accelerator.num_processes)[:, None])
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    if resume_from:
        accelerator.load_state(resume_from)
    for epoch in range(2):
        batches = loader
        if resume_from and epoch == 0:
            batches = accelerator.skip_first_batches(loader, STOP_AFTER)
        for step, (inputs,) in enumerate(batches):
            loss = model(inputs).square().mean() / 1e4
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += accelerator.gather(inputs).flatten().int().tolist()
            if step + 1 == stop_after:
                accelerator.save_state(sys.argv[1])
                accelerator.end_training()
                return seen, None
    weight = accelerator.unwrap_model(model).weight.item()
    accelerator.end_training()
    return seen, weight


all_samples, weight = train()
first, _ = train(stop_after=STOP_AFTER)
rest, resumed = train(resume_from=sys.argv[1])
Accelerator().print("same samples:", first + rest == all_samples, "same weight:", weight == resumed)
