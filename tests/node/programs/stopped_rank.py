import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any

rank, attempt = int(os.environ["RANK"]), int(os.environ["HPCACCEL_ATTEMPT"])
folder = os.environ["HPCACCEL_RUN_DIR"] + f"/attempts/{attempt}"
if attempt == 2:
    sys.exit(0)
os.makedirs(folder + "/heartbeats", exist_ok=True)
stacks = open(f"{folder}/stacks/{rank}.txt", "w")  # noqa: SIM115
faulthandler.register(signal.SIGURG, file=stacks, all_threads=True)
beat: dict[str, Any] = {
    "rank": rank,
    "host": os.environ["NODE_NAME"],
    "pid": os.getpid(),
    "number": 0,
    "time": 0,
    "interval_seconds": 0.1,
    "phase": "training",
    "step": 7,
    "site": "program.py:3",
    "waits": rank == 0,
}


def write():
    beat["number"] += 1
    path = f"{folder}/heartbeats/{rank}.json"
    with open(path + ".tmp", "w") as file:
        json.dump(beat, file)
    os.rename(path + ".tmp", path)


write()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    time.sleep(0.1)
    write()
