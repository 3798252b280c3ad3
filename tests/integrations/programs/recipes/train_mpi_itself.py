"""A real MPI program that saves on SIGTERM: after each step the ranks combine their flags, then save and exit."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI  # type: ignore[import-not-found]

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--restart", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--save-every", type=int, required=True)
args = parser.parse_args()

world = MPI.COMM_WORLD
terminated: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
pause = 0.1 if os.environ["HPCACCEL_ATTEMPT"] == "1" else 0.0
assert (world.rank, world.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def say(*words):
    if world.rank == 0:
        print(*words, flush=True)


def save(step):
    if world.rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "writing").write_text(str(step))
        (args.output / "writing").replace(args.output / f"restart-{step}.dat")
    world.Barrier()


step = int(args.restart.read_text()) if args.restart else 0
say("argv", json.dumps(sys.argv[1:]))
say("began at", step)
while step < args.steps:
    time.sleep(pause)
    step += 1
    say("step", step)
    stopping = world.allreduce(len(terminated), MPI.MAX) > 0
    if stopping or step % args.save_every == 0:
        save(step)
    if stopping:
        say("left at", step)
        sys.exit()
say("finished at", step)
