"""A script that calls transformers' Trainer on a small model with dropout; two lines are hpcaccel's."""

import argparse
import json
import os
import signal
import time

import torch
from transformers import Trainer, TrainingArguments

from hpcaccel.integrations.transformers import HpcaccelCallback, newest_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM in this step")
parser.add_argument("--lr", type=float, default=5e-5)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--save_steps", type=int, default=1000)
parser.add_argument("--eval_steps", type=int, default=0)
parser.add_argument("--jit", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--exact", action="store_true", help="exact_data")
parser.add_argument("--noise", action="store_true", help="the dataset draws random numbers")


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        if options.noise:
            x = x + torch.randn(8)
        return {"x": x, "labels": x.sum()[None]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def forward(self, x, labels):
        output = self.layers(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


class Slow(Trainer):
    def training_step(self, *args, **kwargs):
        time.sleep(options.pause)
        if options.kill == f"{os.environ.get('RANK', 0)}:{self.state.global_step + 1}":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(*args, **kwargs)


options = parser.parse_args()
args = TrainingArguments(
    options.output_dir,
    max_steps=options.steps,
    learning_rate=options.lr,
    gradient_accumulation_steps=options.accumulate,
    per_device_train_batch_size=4,
    dataloader_num_workers=options.workers,
    save_steps=options.save_steps,
    eval_strategy="steps" if options.eval_steps else "no",
    eval_steps=options.eval_steps or None,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    enable_jit_checkpoint=options.jit,
    load_best_model_at_end=False,
)
hpcaccel = HpcaccelCallback(exact_data=options.exact)
trainer = Slow(Model(), args, train_dataset=Data(), eval_dataset=Data(), callbacks=[hpcaccel])
print("training", flush=True)
trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))
trainer.save_model(f"{args.output_dir}/final")
print(json.dumps({"step": trainer.state.global_step}), flush=True)
