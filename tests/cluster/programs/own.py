"""A program with checkpoints of its own that saves when it gets SIGTERM and leaves with 0, as trainers do that know
nothing of hpcaccel.

raise: the signal's exception ends the loop (Lightning). flag: the step's end saves, and the rest of the script runs
(transformers' just-in-time checkpoint).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

how, total, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
own = Path(os.environ["HPCACCEL_RUN_DIR"]) / "own.json"  # a place that outlives the attempt


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
