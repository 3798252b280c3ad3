"""A loop as in Accelerate's tutorials, stopped by the script and resumed in each of the tutorials' ways.

Prints for every way of resuming whether samples and weight equal those of the whole training, and the number of steps;
with ``--from-size`` the samples of each step.
"""

import argparse
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--samples", type=int, default=24)
parser.add_argument("--from-size", type=int, default=0, help="only resume what so many ranks have saved")
args = parser.parse_args()
EPOCHS, BATCH = 3, 2


def train(*, save_at=None, stop=False, resume=None, style="skip"):
    """Train. Returns the samples of each step done here, and the final weight."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    data = TensorDataset(torch.arange(float(args.samples))[:, None])
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, first_epoch, first_batch, seen = 0, 0, None, []
    if resume is not None:
        accelerator.load_state(f"{args.folder}/step_{resume}_of_{args.from_size or accelerator.num_processes}")
        step = resume
        first_epoch, first_batch = divmod(resume, len(loader))
    for epoch in range(first_epoch, EPOCHS):
        batches = loader
        if resume is not None and epoch == first_epoch and style == "skip":
            batches = accelerator.skip_first_batches(loader, first_batch)
        for (inputs,) in batches:
            accelerator.backward(model(inputs).square().mean() / 1e3)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            seen.append(sorted(accelerator.gather(inputs).flatten().int().tolist()))
            if step == save_at:
                accelerator.save_state(f"{args.folder}/step_{step}_of_{accelerator.num_processes}")
                if stop:
                    accelerator.end_training()
                    return seen, None
    weight = accelerator.unwrap_model(model).weight.item()
    accelerator.end_training()
    return seen, weight


told = {}
size = Accelerator(cpu=True).num_processes
length = args.samples // BATCH // size
if args.from_size:
    told["other size"], _ = train(resume=length * size // args.from_size // 2, style="plain")
else:
    whole, weight = train()
    for place, at in (("middle", length // 2), ("end of an epoch", length), ("later", length + 1)):
        first, _ = train(save_at=at, stop=True)
        for style in ("skip", "plain"):
            rest, resumed = train(resume=at, style=style)
            told[f"{place}, {style}"] = [first + rest == whole, resumed == weight, len(rest)]
print(json.dumps(told))
