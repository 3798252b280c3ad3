"""A program without torch that logs the loss of sixteen steps: its argument divided by the step."""

import json
import os
import sys
import time

rate, seconds = float(sys.argv[sys.argv.index("--lr") + 1]), float(sys.argv[sys.argv.index("--seconds") + 1])
with open(os.environ["HPCACCEL_METRICS"], "a") as file:
    for step in range(1, 17):
        print(json.dumps({"step": step, "loss": rate / step}), file=file, flush=True)
        print(f"step {step}", flush=True)
        time.sleep(seconds)
