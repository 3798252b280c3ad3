"""Trains under hundreds of signals, sent from the rendezvous or a given step on until this process has ended."""

import argparse
import os
import subprocess
import threading
import time

import torch

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--from-step", type=int, default=-1, help="-1: while rank 0 waits for the others")
args = parser.parse_args()
first = os.environ["HPCACCEL_ATTEMPT"] == "1"


def besiege():
    """Start a shell that sends the signals; return once it has sent the first one."""
    text = """
        kill -TERM "$0"; echo; exec >&-
        while kill -TERM "$0" 2>/dev/null; do sleep 0.005; kill -USR2 "$0" 2>/dev/null; done
    """
    command = ["bash", "-c", text, str(os.getpid())]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    shell.stdout.readline()
    shell.stdout.close()


class SlowToSave:
    def state_dict(self):
        time.sleep(0.3)
        return {}

    def load_state_dict(self, state):
        pass


if first and args.from_step < 0:
    if os.environ["RANK"] == "0":
        threading.Timer(0.3, besiege).start()
    else:
        time.sleep(1)
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(SlowToSave())
for step in accelerator.steps(8):
    if first and step == args.from_step:
        besiege()
    accelerator.backward(model(torch.ones(4, 2)).mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.checkpoint()
accelerator.print("all steps done")
