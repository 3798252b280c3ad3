"""A real JAX program in hpcaccel's ranks: data-parallel steps, saved at the step on which JAX's processes agree."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy
from jax.experimental import multihost_utils

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--directory", type=Path, required=True)
parser.add_argument("--save_steps", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()

jax.distributed.initialize(
    coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    num_processes=int(os.environ["WORLD_SIZE"]),
    process_id=int(os.environ["RANK"]),
    local_device_ids=[int(os.environ["LOCAL_RANK"])],
)
rank, pause = jax.process_index(), 0.1 if os.environ["HPCACCEL_ATTEMPT"] == "1" else 0.0


def say(*words):
    if rank == 0:
        print(*words, flush=True)


def save(step, weights):
    if rank == 0:
        args.directory.mkdir(parents=True, exist_ok=True)
        with open(args.directory / "writing", "wb") as file:
            numpy.savez(file, step=step, weights=weights)
        os.replace(args.directory / "writing", args.directory / f"step-{step}.npz")
    multihost_utils.sync_global_devices(f"saved {step}")


@jax.jit
def gradient(weights, x):
    return jax.grad(lambda w: ((x @ w - x.sum(axis=1)) ** 2).mean())(weights)


step, weights = 0, numpy.zeros(4, dtype=numpy.float32)
if args.resume:
    saved = numpy.load(args.resume)
    step, weights = int(saved["step"]), saved["weights"]
say("argv", json.dumps(sys.argv[1:]))
say("began at", step)
while step < args.steps:
    time.sleep(pause)
    x = numpy.random.default_rng([step, rank]).standard_normal((8, 4), dtype=numpy.float32)
    gradients = multihost_utils.process_allgather(gradient(weights, x))
    weights = weights - 0.001 * numpy.asarray(gradients).reshape(-1, 4).mean(axis=0)
    step += 1
    say("step", step)
    stopping = multihost_utils.reached_preemption_sync_point(step)
    if stopping or step % args.save_steps == 0:
        save(step, weights)
    if stopping:
        say("left at", step)
        sys.exit()
say("finished at", step)
say("weights", json.dumps(weights.tolist()))
