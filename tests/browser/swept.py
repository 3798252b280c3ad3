"""A sweep with trials that were made up, for the tests of its page."""

from __future__ import annotations

import json
import math
import re
import time
from datetime import datetime
from pathlib import Path

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import WorkerSeen, WorkerStart, to_dict
from hpcaccel.sweeps.sweep_handle import Sweep
from tests.sweeps.sweeping import SPEC, Place, Trials

RUNGS = (20, 60, 180)


def swept(place: Place, *, trials: int = 24) -> Sweep:
    """A sweep over a learning rate, a depth and a dropout; two thirds of its trials were pruned."""
    text = SPEC.replace(
        "  method: random\n", "  method: random\n  pruner:\n    asha: {min_steps: 20, reduction_factor: 3}\n"
    )
    text = text.replace("max_trials: 20", f"max_trials: {trials + 6}\n  max_gpu_hours: 8")
    Path("sweep.yaml").write_text(text.replace("name: demo", "name: gpt-sweep"))
    sweep, _ = place.start()
    made = Trials(sweep.dir)
    begun = time.time() - 5400
    for number in range(trials):
        trial = made.begin()
        steps = RUNGS[0] if number % 3 else RUNGS[1] if number % 2 else 200
        floor = 2.2 - 0.04 * number + 0.3 * math.sin(number * 1.7) ** 2
        lines = [(step, floor + 2.5 * math.exp(-step / 40)) for step in range(5, steps + 1, 5)]
        metrics = sweep.dir.trial(trial).metrics
        metrics.write_text(
            "".join(
                json.dumps({"step": s, "attempt": 1, "time": begun + s, "values": {"loss": v}}) + "\n" for s, v in lines
            )
        )
        for step in (rung for rung in RUNGS if rung <= steps):
            made.study.report(trial, step, lines[step // 5 - 1][1])
        if steps == 200:
            made.study.complete(trial, [lines[-1][1]])
        elif number < trials - 2:
            made.study.prune(trial)
    made.fail(error_class="cuda_out_of_memory", detail="CUDA out of memory: 79.1 of 79.2 GiB used; try a smaller batch")
    start = WorkerStart(time=begun, job_id="1", allocated_at=begun, gpus=4, nodes=["n1"])
    append_line(sweep.dir.worker(0).account, to_dict(start))
    append_line(sweep.dir.worker(0).account, to_dict(WorkerSeen(time=time.time())))
    _spread_ends(sweep, begun, trials)
    return sweep


def _spread_ends(sweep: Sweep, begun: float, trials: int) -> None:
    """Let the trials end one after another, from ``begun`` to now."""
    count = 0

    def end(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        at = datetime.fromtimestamp(begun + (time.time() - begun) * count / (trials + 2))
        return f'"{match[1]}": "{at.isoformat(timespec="microseconds")}"'

    journal = sweep.dir.journal
    text = journal.read_text()
    for name in ("datetime_start", "datetime_complete"):
        count = -2 if name == "datetime_start" else 0
        text = re.sub(rf'"({name})": ?"[^"]*"', end, text)
    journal.write_text(text)
