import json
import os
import signal
import sys
import time
from pathlib import Path

attempt, run = int(os.environ["HPCACCEL_ATTEMPT"]), os.environ["HPCACCEL_RUN_DIR"]
folder = f"{run}/attempts/{attempt}"
asked: list[str] = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append("USR2"))
signal.signal(signal.SIGTERM, lambda *_: asked.append("TERM"))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR2})
print("ready", os.getpid(), flush=True)
if attempt == 1:
    end = time.monotonic() + 60
    while not asked and time.monotonic() < end:
        time.sleep(0.01)
    value = {"version": 1, "reason": "stop", "step": 7, "checkpoint": None, "resume": True}
    Path(folder, "outcome.json").write_text(json.dumps(value))
    sys.exit(85)
