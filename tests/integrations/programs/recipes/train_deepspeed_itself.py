"""A script with DeepSpeed's own engine, started without its launcher: ZeRO on CPUs, checkpoints as the page says."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--deepspeed_config", required=True)
parser.add_argument("--save_dir", required=True)
parser.add_argument("--save_steps", type=int, required=True)
parser.add_argument("--max_steps", type=int, required=True)
parser.add_argument("--load_tag")
args = parser.parse_args()

deepspeed.init_distributed()
rank, pause = torch.distributed.get_rank(), 0.1 if os.environ["HPCACCEL_ATTEMPT"] == "1" else 0.0
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.deepspeed_config)
if args.load_tag:
    engine.load_checkpoint(args.save_dir, tag=args.load_tag)


def say(*words):
    if rank == 0:
        print(*words, flush=True)


say("argv", json.dumps(sys.argv[1:]))
say("began at", engine.global_steps)
while engine.global_steps < args.max_steps:
    time.sleep(pause)
    generator = torch.Generator().manual_seed(2 * engine.global_steps + rank)
    x = torch.randn(8, 4, generator=generator)
    engine.backward((engine(x).squeeze(1) - x.sum(1)).square().mean())
    engine.step()
    if engine.global_steps % args.save_steps == 0:
        engine.save_checkpoint(args.save_dir, save_latest=False)  # returns when all ranks have written
        if rank == 0:
            Path(args.save_dir, "new").write_text(f"global_step{engine.global_steps}")
            Path(args.save_dir, "new").replace(Path(args.save_dir, "latest"))
    say("step", engine.global_steps)
say("finished at", engine.global_steps)
