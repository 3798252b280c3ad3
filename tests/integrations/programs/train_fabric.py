"""A loop with Lightning's Fabric on a small model, with scheduler and accumulation, and with a stop gate."""

import argparse
import json
import os
import signal
import time
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

from hpcaccel.integrations.fabric import add_stop_gate, newest_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM in this step")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save_steps", type=int, default=0)
parser.add_argument("--strategy", choices=["ddp", "fsdp2", "auto"], default="ddp")
parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
options = parser.parse_args()
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * options.steps * options.accumulate * WORLD

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum()[None]


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


strategy = ModelParallelStrategy(shard, WORLD, 1) if options.strategy == "fsdp2" else options.strategy
nodes = WORLD // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
fabric = Fabric(accelerator="cpu", num_nodes=nodes, devices=options.devices, strategy=strategy)
fabric.launch()
fabric.seed_everything(0)
model = fabric.setup_module(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
optimizer: Any = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
optimizer = fabric.setup_optimizers(optimizer)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=options.workers))
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
add_stop_gate(fabric, options.output_dir, state, total_steps=options.steps)
if (path := newest_checkpoint(options.output_dir)) is not None:
    fabric.load(path, state)
    if options.strategy == "fsdp2":  # Fabric puts the scheduler's state there instead of loading it
        scheduler.load_state_dict(state["scheduler"])
        state["scheduler"] = scheduler
start = state["step"]
print("training", flush=True)
for number, (x, y) in enumerate(loader):
    if number < start * options.accumulate:
        continue
    time.sleep(options.pause)
    whole = (number + 1) % options.accumulate == 0
    if whole and options.kill == f"{fabric.global_rank}:{state['step'] + 1}":
        os.kill(os.getpid(), signal.SIGTERM)
    with fabric.no_backward_sync(model, enabled=not whole):
        loss = (model(x) - y).square().mean()
        fabric.backward(loss / options.accumulate)
    if whole:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["step"] += 1
        fabric.log("loss", fabric.all_reduce(loss.detach()), step=state["step"])
        if options.save_steps and state["step"] % options.save_steps == 0:
            fabric.save(f"{options.output_dir}/step={state['step']}.ckpt", state)
fabric.barrier()
rate = optimizer.param_groups[0]["lr"]
print(json.dumps({"step": state["step"], "rate": rate}), flush=True)
