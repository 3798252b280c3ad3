"""A training loop without an Accelerator: DDP by hand, a loader with workers, and hpcaccel's stop gate."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hpcaccel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM in this step")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--context", default="fork")
parser.add_argument("--group", choices=["before", "after", "none"], default="before")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--finish", action="store_true", help="leave the loop if the run is to finish")
parser.add_argument("--ignore", action="store_true", help="end normally although a stop was requested")


def main() -> None:
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    if args.group == "before":
        dist.init_process_group("gloo")
    gate = hpcaccel.stop_gate()
    if args.group == "after":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(4, 1)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    newest = max((int(path.stem) for path in args.folder.glob("*.pt")), default=0)
    gate.begin(newest, checkpoint=args.folder / f"{newest}.pt" if newest else None, total_steps=args.steps)
    data = TensorDataset(torch.randn(4096, 4))
    loader = DataLoader(
        data,
        batch_size=4,
        num_workers=args.workers,
        multiprocessing_context=args.context if args.workers else None,
        persistent_workers=bool(args.workers),
    )
    step = newest
    for (batch,) in loader:
        if step == args.steps:
            break
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        step += 1
        if step == 1:
            print("training", flush=True)
        time.sleep(args.pause)
        if args.kill == f"{rank}:{step}":
            os.kill(os.getpid(), signal.SIGTERM)
        if not gate.step(step):
            if gate.should_save:
                print("asked to save at", step, flush=True)
                if rank == 0:
                    torch.save(model.state_dict(), args.folder / f"{step}.pt")
                gate.saved()
            continue
        print(json.dumps({"step": step, "reason": gate.reason, "in_time": gate.in_time}), flush=True)
        if args.ignore:
            break
        if args.finish and gate.should_finish:
            break
        if rank == 0:
            torch.save(model.state_dict(), args.folder / f"{step}.pt")
        gate.leave(checkpoint=args.folder / f"{step}.pt")
    print(json.dumps({"step": step, "end": True}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
