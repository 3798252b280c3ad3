"""Measure how long it takes to read the status of a sweep of 10,000 trials, each time in a fresh process.

The sweep is a real one with one trial on the local backend. Its journal is then replaced by a larger one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from hpcaccel.sweeps.journal_file import JournalFile

TRIALS = 10_000
TURNS = 5
LIMIT_SECONDS = 1.0

SPEC = """
name: status
entrypoint: {command: [sh, -c, 'echo "{\\"step\\": 1, \\"loss\\": 1}" >> $HPCACCEL_METRICS']}
slurm: {ntasks_per_node: 1, time: 10}
runtime: {stop: signals}
sweep: {method: random, metric: loss, max_trials: 1, parameters: {args.lr: {float: [1.0e-4, 1.0e-1], log: true}}}
"""
HPCACCEL = [sys.executable, "-m", "hpcaccel"]

OURS = """
import sys
from hpcaccel.sweeps.journal_reader import read_study
from hpcaccel.sweeps.results import Goal, best, counts
trials = read_study(sys.argv[1]).trials
print(counts(trials), best(trials, Goal.of({"metric": "loss"})).trial.number)
"""
OPTUNAS = """
import collections, sys, optuna
storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(sys.argv[1]))
study = optuna.load_study(study_name="sweep", storage=storage)
print(collections.Counter(trial.state for trial in study.get_trials(deepcopy=False)), study.best_trial.number)
"""
SPACE: dict[str, BaseDistribution] = {
    "args.lr": FloatDistribution(1e-5, 1e-1, log=True),
    "args.weight_decay": FloatDistribution(0.0, 0.1),
    "args.depth": IntDistribution(2, 12),
    "args.width": CategoricalDistribution([256, 512, 1024]),
    "runtime.mixed_precision": CategoricalDistribution(["no", "bf16"]),
}


def main() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(XDG_STATE_HOME=folder, XDG_CONFIG_HOME=folder, HPCACCEL_RUNS_DIR=folder)
        sweep = _started(Path(folder))
        path, bare = sweep / "journal.jsonl", Path(folder) / "bare.jsonl"
        write_journal(path, bare, TRIALS)
        commands = {
            "hpcaccel sweep status": [*HPCACCEL, "sweep", "status", str(sweep)],
            "  of this: reading, states, best trial": [sys.executable, "-c", OURS, str(path)],
            "optuna.load_study": [sys.executable, "-c", OPTUNAS, str(bare)],
        }
        size = path.stat().st_size / 2**20
        print(f"{f'{TRIALS} trials, {size:.0f} MiB, from process start':58}{'median':>10}{'limit':>10}")
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(TURNS):
            for name, command in commands.items():
                seconds[name].append(timed(command))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, median in medians.items():
        limit = f"{LIMIT_SECONDS:8.1f} s" if name == "hpcaccel sweep status" else ""
        print(f"{name:58}{median:8.2f} s{limit}{'  too slow' if limit and median > LIMIT_SECONDS else ''}")
    return medians["hpcaccel sweep status"] <= LIMIT_SECONDS


def _started(folder: Path) -> Path:
    """The directory of a sweep that has ended, without a journal."""
    spec = folder / "sweep.yaml"
    spec.write_text(SPEC)
    command = [*HPCACCEL, "sweep", "start", str(spec), "--cluster", "local", "--wait", "--json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sweep = Path(json.loads(said)["path"])
    for path in sweep.glob("journal*.jsonl"):
        path.unlink()
    return sweep


def timed(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def write_journal(path: Path, bare: Path, trials: int) -> None:
    """Journal lines as workers of an ASHA sweep write them: five parameters, one to four rungs, claims and marks."""
    source = random.Random(0)
    lines = [_line(0, study_name="sweep", directions=[1])]
    for number in range(trials):
        lines += _trial(number, source)
    JournalFile(path).append(lines, sync=True)
    JournalFile(bare).append([line for line in lines if "op_code" in line], sync=True)


def _trial(number: int, source: random.Random) -> list[dict[str, Any]]:
    moment = f"2026-11-20T{source.randrange(24):02}:30:12.000000+00:00"
    rungs = source.choices((1, 2, 3, 4), (48, 12, 3, 1))[0]
    lines = [
        _line(4, study_id=0, datetime_start=moment),
        {"hpcaccel": "claim", "trial": number, "worker": number % 64, "epoch": 1, "time": 1.0},
    ]
    for name, distribution in SPACE.items():
        value = 1 if isinstance(distribution, CategoricalDistribution) else source.choice((0.01, 0.05))
        value = 4.0 if isinstance(distribution, IntDistribution) else value
        shown = distribution_to_json(distribution)
        lines.append(_line(5, trial_id=number, param_name=name, param_value_internal=value, distribution=shown))
    lines += [_line(7, trial_id=number, step=4**rung, intermediate_value=source.random()) for rung in range(rungs)]
    marks = {"gpu_seconds": source.random() * 1e4, "steps": 4**rungs, "attempts": 1}
    lines += [_line(8, trial_id=number, user_attr={name: value}) for name, value in marks.items()]
    state = 1 if rungs == 4 else 2
    lines.append(_line(6, trial_id=number, state=state, values=[source.random()], datetime_complete=moment))
    return lines


def _line(operation: int, **fields: Any) -> dict[str, Any]:
    return {"op_code": operation, "worker_id": "8a4a8fb6-5d0c-4d9f-a1c1-2a6b4f0b6a55-139923498374976", **fields}


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
