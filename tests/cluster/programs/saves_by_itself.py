"""A program without torch that saves a directory every fifth step, and knows nothing of signals or deadlines.

``saves_by_itself.py OUT STEPS SECONDS [--resume PATH]``
"""

import json
import os
import sys
import time
from pathlib import Path

out, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
step = 0
if "--resume" in sys.argv:
    step = json.loads((Path(sys.argv[sys.argv.index("--resume") + 1]) / "state.json").read_text())["step"]
print(f"from {step}", flush=True)
while step < steps:
    time.sleep(seconds)
    step += 1
    if step % 5 == 0:
        folder = out / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        with (folder / "done").open("w") as file:
            file.write("x")
            os.fsync(file.fileno())
print(f"trained to {step}", flush=True)
