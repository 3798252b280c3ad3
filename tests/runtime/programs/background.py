"""Background saves whose writer is stopped, killed, or still writing when the program ends."""

import json
import os
import signal
import sys
import time

import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.training_session import TrainingSession

accelerator = Accelerator()
model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.AdamW(m.parameters())))(nn.Linear(64, 64)))
rank, error_at, said = accelerator.process_index, None, ""


def writer():
    return TrainingSession.existing().loop.context.checkpoints._run_engine.background._writer._process.pid


def wait_for_writer():
    checkpoints = TrainingSession.existing().loop.context.checkpoints
    while checkpoints.in_flight and checkpoints.progress() == "busy":
        time.sleep(0.01)


for step in accelerator.steps(25):
    if step == 4 or step > 16:
        wait_for_writer()
    if step == 6 and rank == 1:
        os.kill(writer(), signal.SIGSTOP)  # the save due at step 8 stays in progress
    if step == 13 and rank == 1:
        os.kill(writer(), signal.SIGKILL)
        time.sleep(0.2)
    accelerator.backward(model(torch.randn(4, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    try:
        accelerator.checkpoint()
    except CheckpointError as error:
        error_at, said = step + 1, str(error)
    if step == 23:  # its save has just begun
        if sys.argv[1] == "stop" and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if sys.argv[1] == "break":
            break
if rank == 0:
    print(json.dumps({"error_at": error_at, "said": said}), flush=True)
else:
    print(f"rank 1: {error_at}", flush=True)
