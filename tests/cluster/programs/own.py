"""A program with its own checkpoints that saves on SIGTERM and exits with 0, like trainers without hpcaccel.

raise: an exception in the signal handler ends the loop (Lightning). flag: the loop ends after the step, and the rest of
the script runs (transformers' just-in-time checkpoint).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

how, total, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
own = Path(os.environ["HPCACCEL_RUN_DIR"]) / "own.json"  # outlives the attempt


class Terminated(Exception):
    pass


asked = False


def on_term(number: int, frame: FrameType | None) -> None:
    global asked
    asked = True
    if how == "raise":
        raise Terminated


def save(step: int) -> None:
    own.write_text(json.dumps(step))


signal.signal(signal.SIGTERM, on_term)
step = json.loads(own.read_text()) if own.exists() else 0
print("from", step, flush=True)
try:
    while step < total and not asked:
        time.sleep(seconds)
        step += 1
        with open(os.environ["HPCACCEL_METRICS"], "a") as metrics:
            metrics.write(json.dumps({"step": step, "loss": 1 / step}) + "\n")
except Terminated:
    pass
save(step)
print("left at", step, flush=True)
