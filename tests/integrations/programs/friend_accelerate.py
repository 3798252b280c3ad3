"""hpcaccel's and accelerate's Accelerator in one process, and transformers' Trainer, which is built on accelerate's.

Both train the same model on the same data, in turns: hpcaccel's Accelerator accumulates two halves of each batch,
accelerate's takes the batch whole. With ``--apart``, hpcaccel's ends its training before accelerate's is created.
Prints what each says about the process, and which environment variables the creation of each has changed.
"""

import argparse
import json
import os
import random
from typing import Any

import accelerate
import accelerate.state
import accelerate.utils
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import hpcaccel
import hpcaccel.state
import hpcaccel.utils

parser = argparse.ArgumentParser()
parser.add_argument("--first", choices=("hpcaccel", "accelerate"), required=True)
parser.add_argument("--apart", action="store_true")
parser.add_argument("--precision", default="no", help="of hpcaccel's Accelerator")
parser.add_argument("--output_dir", required=True)
options = parser.parse_args()


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum()[None]}


DATA = TensorDataset(torch.stack([Rows()[index]["x"] for index in range(64)]))
found: dict[str, Any] = {
    name: {} for name in ("changed", "drawn", "ranks", "accumulation", "module", "weight", "gathered", "seeded")
}


def made(name, make):
    """The Accelerator that ``make`` creates, and a prepared model with its optimizer and loader."""
    before, generator = dict(os.environ), torch.get_rng_state()
    accelerator = make()
    after = dict(os.environ)
    found["changed"][name] = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    found["drawn"][name] = not torch.equal(generator, torch.get_rng_state())
    found["ranks"][name] = [accelerator.process_index, accelerator.num_processes]
    found["accumulation"][name] = accelerator.gradient_accumulation_steps
    line = Line()
    model, optimizer = accelerator.prepare(line, torch.optim.SGD(line.parameters(), lr=0.05))
    loader = accelerator.prepare(DataLoader(DATA, batch_size=4))
    found["module"][name] = type(optimizer).__module__.partition(".")[0]
    return accelerator, line, model, optimizer, loader


def training(name, accelerator, line, model, optimizer, loader, *, parts):
    """Train on ``parts`` parts of each batch; yield after each batch, with ``sync_gradients`` after each part."""
    for (batch,) in loader:
        syncing = []
        for x in batch.chunk(parts):
            with accelerator.accumulate(model):
                accelerator.backward(model(x, x.sum(1, keepdim=True))["loss"])
                optimizer.step()
                optimizer.zero_grad()
            syncing.append(accelerator.sync_gradients)
        yield batch.tolist(), syncing
    rank = torch.tensor([float(accelerator.process_index)])
    found["gathered"][name] = accelerator.gather(rank).tolist()
    found["weight"][name] = line.layer.weight.tolist()


def ours():
    halves = hpcaccel.utils.GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    return hpcaccel.Accelerator(cpu=True, gradient_accumulation_plugin=halves, mixed_precision=options.precision)


def theirs():
    return accelerate.Accelerator(cpu=True)


makers = {"hpcaccel": ours, "accelerate": theirs}
names = sorted(makers, key=lambda name: name != options.first)
if options.apart:
    our = made("hpcaccel", ours)
    our_steps = tuple(training("hpcaccel", *our, parts=2))
    our_state = hpcaccel.state.AcceleratorState()
    found["our state"] = [our_state.num_processes, our_state.mixed_precision]
    our[0].end_training()
    their = made("accelerate", theirs)
    their_steps = tuple(training("accelerate", *their, parts=1))
else:
    both = {name: made(name, makers[name]) for name in names}
    our, their = both["hpcaccel"], both["accelerate"]
    turns = zip(
        training("hpcaccel", *our, parts=2), training("accelerate", *their, parts=1), strict=True
    )  # a batch by one, then a batch by the other
    our_steps, their_steps = zip(*turns, strict=True)
    our_state = hpcaccel.state.AcceleratorState()
    found["our state"] = [our_state.num_processes, our_state.mixed_precision]
found["same data"] = [batch for batch, _ in our_steps] == [batch for batch, _ in their_steps]
found["syncing"] = [[ours, theirs] for (_, ours), (_, theirs) in zip(our_steps, their_steps, strict=True)]
their_state = accelerate.state.AcceleratorState()
found["their state"] = [type(their_state).__module__, their_state.num_processes, their_state.mixed_precision]

args = TrainingArguments(
    options.output_dir,
    max_steps=4,
    per_device_train_batch_size=4,
    save_strategy="no",
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(Line(), args, train_dataset=Rows())
trainer.train()
found["trainer"] = [trainer.state.global_step, args.world_size, sum("loss" in log for log in trainer.state.log_history)]

for name, package in (("hpcaccel", hpcaccel), ("accelerate", accelerate)):
    package.utils.set_seed(3)
    found["seeded"][name] = [random.random(), torch.rand(()).item()]
if not options.apart:
    our[0].end_training()
try:
    found["afterwards"] = their[0].gather(torch.ones(1)).tolist()
except ValueError as error:
    found["afterwards"] = str(error)
print(json.dumps(found), flush=True)
