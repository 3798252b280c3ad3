"""Ranks that do unequal numbers of steps without a model."""

import argparse
import os
import signal

from hpcaccel import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--kill-at", type=int, default=-1)
args = parser.parse_args()


class Count:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


accelerator = Accelerator()
count = Count()
accelerator.register_for_checkpointing(count)
for step in accelerator.steps(3 + 4 * accelerator.process_index):
    count.value += 1
    if accelerator.is_main_process is False and step == args.kill_at:
        os.kill(os.getpid(), signal.SIGTERM)
    accelerator.checkpoint()
print(f"rank {accelerator.process_index} did {count.value} steps", flush=True)
