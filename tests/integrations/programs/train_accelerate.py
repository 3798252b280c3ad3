"""A script of accelerate.Accelerator on a small model, with scheduler and accumulation, and with a stop gate."""

import argparse
import json
import os
import signal
import time

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration

from hpcaccel.integrations.accelerate import add_stop_gate, newest_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM in this step")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save_steps", type=int, default=0)
options = parser.parse_args()
PER_EPOCH = 16


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * PER_EPOCH * options.accumulate * int(os.environ.get("WORLD_SIZE", 1))

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum()[None]


torch.manual_seed(0)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=options.accumulate,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the same order after a resume
)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True, num_workers=options.workers)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
add_stop_gate(accelerator, options.output_dir, total_steps=options.steps)
step = 0
if (path := newest_checkpoint(options.output_dir)) is not None:
    accelerator.load_state(path)
    step = int(path.rpartition("-")[2])
print("training", flush=True)
for epoch in range(step // PER_EPOCH, -(-options.steps // PER_EPOCH)):
    done = step - epoch * PER_EPOCH
    loader.set_epoch(epoch)
    for x, y in skip_first_batches(loader, done * options.accumulate):
        time.sleep(options.pause)
        if accelerator.sync_gradients and options.kill == f"{accelerator.process_index}:{step + 1}":
            os.kill(os.getpid(), signal.SIGTERM)
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.log({"loss": accelerator.gather(loss.detach()).mean().item()}, step=step)
            if options.save_steps and step % options.save_steps == 0:
                accelerator.save_state(f"{options.output_dir}/checkpoint-{step}")
            if step == options.steps:
                break
accelerator.wait_for_everyone()
rate = optimizer.param_groups[0]["lr"]
print(json.dumps({"step": step, "rate": rate}), flush=True)
accelerator.end_training()
