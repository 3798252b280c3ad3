"""Measure the time from a killed rank to the next training step, cold and with warm parents, and where it goes.

Runs with ``resilience.warm_restart: off`` and ``auto`` take turns, with two ranks each. In each run a rank is killed
several times, each time after a new checkpoint. The parts come from the ledger and from the attempts' ``timing.json``;
rendezvous, load and step "by themselves" are those of a second training in processes that have imported everything.
What the script does before it loads (its model, its data, ``prepare``) is measured in the same way, for comparison.
With a small state the constant parts count most; with a large one, load and step do.

Exits with 1 if a limit is exceeded. With ``--slurm`` the runs are jobs of the cluster that ``sbatch`` reaches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir

SIZES = {"50 MB": 4, "600 MB": 48}
"""Layers of the model, by the size of the state: parameters and AdamW's two averages, 12.6 MB a layer."""
PARTS = ("detection and decision", "new processes", "imports", "rendezvous", "preparation", "load", "first step")
MOST_OF_ALONE = 1.5
"""Limit of a warm restart, as a multiple of rendezvous, load and one step by themselves."""
MOST_OF_COLD = 1 / 3
MOST_OF_FIRST_START = 1.15
WAIT_SECONDS = 600.0

PROGRAM = """\
import os, sys, time
print("pid", os.getpid(), flush=True)
import torch
from torch import nn
from hpcaccel import Accelerator

def train(steps, *, again=False):
    begin = time.perf_counter()
    torch.manual_seed(0)
    accelerator = Accelerator()
    formed = time.perf_counter()
    layers = int(os.environ["LAYERS"])
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(1024, 1024), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(4096, 1024))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    prepared = time.perf_counter()
    accelerator.load_state() if again else accelerator.resume()
    loaded = time.perf_counter()
    done = 0
    for _ in range(10**6) if again else accelerator.epochs(10**6):
        for (inputs,) in loader:
            loss = model(inputs).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if not again:
                accelerator.checkpoint()
            done += 1
            if done == 1:
                first = time.perf_counter()
            if done == steps:
                return accelerator, (formed - begin, loaded - prepared, first - loaded, prepared - formed)
            time.sleep(0.02)

if len(sys.argv) > 1:
    for turn in range(int(sys.argv[1])):
        accelerator, seconds = train(30 if turn == 0 else 2, again=turn > 0)
        accelerator.wait_for_everyone()
        if turn and accelerator.is_main_process:
            print("alone", *seconds, flush=True)
        accelerator.end_training()
        time.sleep(0.2)
else:
    train(10**9)
"""


class Run:
    """A run of ``PROGRAM``."""

    def __init__(self, folder: Path, *, layers: int, warm: str, kills: int, slurm: bool) -> None:
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(PROGRAM)
        resources = {"nodes": 1, "ntasks_per_node": 2, "cpus_per_task": 1, "time": "1:00:00"}
        spec = {
            "name": "restart",
            "entrypoint": {"script": "train.py"},
            "environment": {"python": sys.executable, "env": {"LAYERS": str(layers)}},
            "checkpoint": {"every_steps": 20},
            "resilience": {"warm_restart": warm, "restart_in_place": kills, "max_failures": kills + 1},
            "slurm": resources,
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(spec))
        self._folder = folder
        self._environment = {**os.environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        command = ["submit", str(folder / "job.yaml"), "--json", *([] if slurm else ["--cluster", "local"])]
        self.dir = RunDir(json.loads(self._cli(*command))["path"])

    def _cli(self, *words: str) -> str:
        command = [sys.executable, "-m", "hpcaccel", *words]
        return subprocess.run(
            command, env=self._environment, cwd=self._folder, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def cancel(self) -> None:
        self._cli("cancel", self.dir.run_id)

    def line(self, event: str, attempt: int) -> dict[str, Any]:
        found = [line for line, _ in read_lines(self.dir.ledger)]
        return next(line for line in found if (line["event"], line["attempt"]) == (event, attempt))

    def timing(self, attempt: int) -> dict[str, Any]:
        """``timing.json`` of an attempt once it has done a step."""

        def done() -> bool:
            path = self.dir.timing(attempt)
            return path.exists() and json.loads(path.read_text()).get("first_step_time") is not None

        wait_for(done, f"the first step of attempt {attempt}")
        value: dict[str, Any] = json.loads(self.dir.timing(attempt).read_text())
        return value

    def wait_for_save(self, attempt: int) -> None:
        wait_for(lambda: any(True for _ in read_lines(self.dir.saves(attempt))), f"a save of attempt {attempt}")

    def wait_until_warm(self) -> None:
        log = self.dir.supervisor_log(1)
        wait_for(lambda: "warm parents have imported" in log.read_text(), "warm parents")

    def kill_rank(self, attempt: int, rank: int) -> float:
        """Kill a rank. Returns the time (seconds since the epoch)."""
        pid = int(self.dir.rank_log(attempt, rank).read_text().split()[1])
        now = time.time()
        os.kill(pid, signal.SIGKILL)
        return now

    def first_start(self) -> float:
        """Seconds from the start of the first attempt to its first step."""
        return float(self.timing(1)["first_step_time"] - self.line("start", 1)["time"])

    def restart(self, attempt: int) -> dict[str, float]:
        """Kill a rank of an attempt. Returns the parts of the time until the next attempt's first step, in seconds."""
        self.wait_for_save(attempt)
        killed = self.kill_rank(attempt, attempt % 2)
        timing = self.timing(attempt + 1)
        names = ("process_started", "imported", "formed", "prepared", "loaded", "first_step_time")
        moments = [killed, self.line("start", attempt + 1)["time"], *(timing[name] for name in names)]
        parts = [later - earlier for earlier, later in itertools.pairwise(moments)]
        return {**dict(zip(PARTS, parts, strict=True)), "total": moments[-1] - killed}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)


def alone(folder: Path, *, layers: int, turns: int) -> list[float]:
    """Medians of rendezvous, load, first step and preparation, in seconds, once everything has been imported."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    run = RunDir(folder / "20260101-000000-abcdef")
    run.create()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = {"runtime": {}, "checkpoint": {"every_steps": 20}}
    run.spec.write_text(json.dumps({"version": 1, "spec": spec}))
    run.attempt(1).mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        own["LAYERS"] = str(layers)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HPCACCEL_RUN_DIR": str(run.path)}
        environment = {**os.environ, **own, **where, "HPCACCEL_ATTEMPT": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(folder / "train.py"), str(turns + 1)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate()[0] for rank in ranks]
    rows = [list(map(float, line.split()[1:])) for line in said[0].splitlines() if line.startswith("alone")]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, action="append", help="default: each")
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--kills", type=int, default=2, help="killed ranks in each run (default: 2)")
    parser.add_argument("--slurm", action="store_true", help="submit to Slurm instead of the local backend")
    options = parser.parse_args()
    held = [measure(size, options) for size in options.size or SIZES]
    return 0 if all(held) else 1


def measure(size: str, options: argparse.Namespace) -> bool:
    """Measure and report the restarts with a state of a size. Returns whether all limits hold."""
    layers = SIZES[size]
    restarts: dict[str, list[dict[str, float]]] = {"off": [], "auto": []}
    starts: dict[str, list[float]] = {"off": [], "auto": []}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a cancelled run may still write
        parts_alone = alone(Path(folder) / "alone", layers=layers, turns=5)
        for number in range(options.runs):
            for warm in ("off", "auto") if number % 2 else ("auto", "off"):
                place = Path(folder) / f"{warm}-{number}"
                run = Run(place, layers=layers, warm=warm, kills=options.kills, slurm=options.slurm)
                try:
                    starts[warm].append(run.first_start())
                    if warm == "auto":
                        run.wait_until_warm()
                    restarts[warm] += [run.restart(attempt) for attempt in range(1, options.kills + 1)]
                finally:
                    run.cancel()
    print(f"\nA state of {size}, 2 ranks")
    return report(restarts, starts, parts_alone)


def report(
    restarts: dict[str, list[dict[str, float]]], starts: dict[str, list[float]], parts_alone: list[float]
) -> bool:
    count = len(restarts["off"])
    print(f"From a killed rank to the next step, median of {count} restarts, in seconds\n")
    print(f"{'':26}{'cold':>8}{'warm':>8}{'by itself':>11}")
    known = dict(zip(("rendezvous", "load", "first step", "preparation"), parts_alone, strict=True))
    medians = {}
    for name in (*PARTS, "total"):
        cold, warm = (statistics.median(one[name] for one in restarts[mode]) for mode in ("off", "auto"))
        medians[name] = (cold, warm)
        print(f"{name:26}{cold:8.2f}{warm:8.2f}" + (f"{known[name]:11.2f}" if name in known else ""))
    cold, warm = medians["total"]
    print()
    first = statistics.median(starts["auto"]) / statistics.median(starts["off"])
    ratios = {
        "warm restart / (rendezvous + load + step by themselves)": (warm / sum(parts_alone[:3]), MOST_OF_ALONE),
        "warm restart / cold restart": (warm / cold, MOST_OF_COLD),
        "first start with warm parents / without": (first, MOST_OF_FIRST_START),
    }
    print(f"{'the same, with preparation by itself':58}{warm / sum(parts_alone):7.2f}")
    passed = True
    for name, (ratio, limit) in ratios.items():
        passed = passed and ratio <= limit
        print(f"{name:58}{ratio:7.2f}   limit {limit:.2f}" + ("" if ratio <= limit else "  exceeded"))
    return passed


if __name__ == "__main__":
    sys.exit(main())
