"""A script that calls Lightning's Trainer on a small model; two lines are hpcaccel's."""

import argparse
import json
import os
import signal
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from hpcaccel.integrations.lightning import HpcaccelCallback, newest_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM in this step")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save_steps", type=int, default=0)
parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
parser.add_argument("--exact", action="store_true", help="exact_data, dropout, and a dataset that draws numbers")
options = parser.parse_args()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        if options.exact:
            return 8 * 15 * int(os.environ.get("WORLD_SIZE", 1))  # epochs of 30 batches on each rank
        return 8 * options.steps * options.accumulate * int(os.environ.get("WORLD_SIZE", 1))

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        if options.exact:
            x = x + torch.randn(8)
        return x, x.sum()[None]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        dropout = torch.nn.Dropout(0.1 if options.exact else 0.0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), dropout, torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        time.sleep(options.pause)
        if options.kill == f"{self.global_rank}:{self.global_step + 1}":
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch
        loss = (self.layers(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=options.lr)


nodes = int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
saves = [ModelCheckpoint(every_n_train_steps=options.save_steps)] if options.save_steps else []
trainer = Trainer(
    accelerator="cpu",
    num_nodes=nodes,
    devices=options.devices,
    strategy="ddp",
    max_steps=options.steps,
    log_every_n_steps=1,
    logger=False,
    enable_checkpointing=bool(saves),
    enable_progress_bar=False,
    default_root_dir=options.root,
    callbacks=[HpcaccelCallback(exact_data=options.exact), *saves],
)
loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=options.exact, num_workers=options.workers)
print("training", flush=True)
trainer.fit(Model(), loader, ckpt_path=newest_checkpoint(options.root))
print(json.dumps({"step": trainer.global_step}), flush=True)
