"""A real run whose rank is killed again and again, to check the simulation of lost time (``lost_time``).

The run is one of the local backend. Its program needs no torch: a step sleeps, and every ``EVERY`` steps it writes its
step to a file, from which the next attempt continues. The simulation gets the same times from start to fault, and the
run's median time from a kill to the next step.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scale.lost_time import Recovery, ettr

__all__ = ["measure"]

STEP_SECONDS, EVERY = 0.05, 20
MTTF_SECONDS, FAULTS, TAIL_SECONDS = 5.0, 12, 5.0
"""The last fault is followed by ``TAIL_SECONDS`` of training."""
WAIT_SECONDS = 120.0
ROOT = Path(__file__).parents[2]
PROGRAM = f"""\
import json, os, time
run, metrics = os.environ["HPCACCEL_RUN_DIR"], open(os.environ["HPCACCEL_METRICS"], "a")
state, steps = os.path.join(run, "state"), open(os.path.join(run, "steps.jsonl"), "a")
step = int(open(state).read()) if os.path.exists(state) else 0
def say(file, **line):
    file.write(json.dumps(line) + "\\n")
    file.flush()
say(steps, pid=os.getpid(), step=step, time=time.time())
while True:
    time.sleep({STEP_SECONDS})
    step += 1
    say(steps, step=step, time=time.time())
    say(metrics, step=step, loss=1.0)
    if step % {EVERY} == 0:
        open(state + ".new", "w").write(str(step))
        os.replace(state + ".new", state)
"""


def measure() -> dict[str, float]:
    """Returns the measured and the simulated share of useful time, and what the simulation was given."""
    calm = 1.5 * EVERY * STEP_SECONDS  # two failures without a checkpoint between them would end the run
    dice = random.Random(0)
    gaps = [max(calm, dice.expovariate(1 / MTTF_SECONDS)) for _ in range(FAULTS)]
    with tempfile.TemporaryDirectory() as folder:
        lines, kills, end = _run(Path(folder), gaps)
    starts = [line for line in lines if "pid" in line]
    seconds = statistics.median(
        after["time"] - before["time"] for before, after in itertools.pairwise(lines) if "pid" not in after
    )
    restart = statistics.median(start["time"] - kill for kill, start in zip(kills, starts[1:], strict=True))
    total = end - starts[0]["time"]
    last = max(line["step"] for line in lines if line["time"] >= starts[-1]["time"])
    simulated = ettr(
        Recovery(),
        interval_seconds=EVERY * seconds,
        mttf_hours=1.0,
        days=total / 86400,
        gaps=gaps,
        values={
            "detection": 0.0, "cold start": restart, "load from files": 0.0, "stall of a save": 0.0,
            "durable after": 0.0, "share of lost nodes": 0.0,
        },
    )  # fmt: skip
    return {
        "faults": FAULTS, "seconds": total, "restart_seconds": restart, "step_seconds": seconds,
        "measured": last * seconds / total, "simulated": simulated,
    }  # fmt: skip


def _run(folder: Path, gaps: list[float]) -> tuple[list[dict[str, Any]], list[float], float]:
    """Lines of the program, times of the kills, and the time when the run was cancelled."""
    (folder / "train.py").write_text(PROGRAM)
    spec = {
        "name": "faulty", "entrypoint": {"script": "train.py"}, "environment": {"python": sys.executable},
        "slurm": {"nodes": 1, "ntasks_per_node": 1},
        "resilience": {"restart_in_place": len(gaps), "max_failures": len(gaps) + 1, "preflight": "off"},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(spec))  # YAML, too
    run = Path(json.loads(_cli(folder, "submit", "job.yaml", "--cluster", "local", "--json"))["path"])
    kills = []
    for number, gap in enumerate(gaps, start=1):
        start = _wait_for_start(run, number)
        time.sleep(max(0.0, start["time"] + gap - time.time()))
        os.kill(start["pid"], signal.SIGKILL)
        kills.append(time.time())
    start = _wait_for_start(run, len(gaps) + 1)
    time.sleep(TAIL_SECONDS)
    lines, end = _lines(run), time.time()
    _cli(folder, "cancel", run.name)
    return lines, kills, end


def _wait_for_start(run: Path, number: int) -> dict[str, Any]:
    limit = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < limit:
        starts = [line for line in _lines(run) if "pid" in line]
        if len(starts) >= number:
            return starts[number - 1]
        time.sleep(0.02)
    raise TimeoutError(f"attempt {number} has not begun: {(run / 'slurm.log').read_text()[-2000:]}")


def _lines(run: Path) -> list[dict[str, Any]]:
    path = run / "steps.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _cli(folder: Path, *words: str) -> str:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hpcaccel", *words]
    done = subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout
