import json
import os
import signal
import sys
import time
from pathlib import Path

state = Path(os.environ["HPCACCEL_RUN_DIR"], "state")
asked: list[bool] = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
pace = 1.0 if os.environ["HPCACCEL_ATTEMPT"] == "1" and float(sys.argv[2]) < 3 else 0.02
step = int(state.read_text()) if state.exists() else 0
with open(os.environ["HPCACCEL_METRICS"], "a") as file:
    while step < 40 and not asked:
        step += 1
        print(json.dumps({"step": step, "loss": float(sys.argv[2]) / step}), file=file, flush=True)
        time.sleep(pace)
state.write_text(str(step))
sys.exit(143 if asked else 0)
