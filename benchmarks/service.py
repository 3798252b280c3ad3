"""Measure the service with many runs, a long metrics file and many viewers: ``benchmarks/service.py [--runs N]``.

Times are compared with reading the same files once, plainly, with ``json.loads`` a line. The service is a process of
its own. Exits with 1 if a limit is exceeded:

- the first page of 10,000 runs that were listed before: 1 s, and 0.5 of reading the runs' ledgers and metrics once;
- a curve of 1,000,000 lines: at the first time 3 times reading the file, then 0.5 s;
- 200 viewers who look for a minute: one squeue a minute (a stand-in counts), and at most 32 MB more memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from many_runs import make_run

from hpcaccel import Client
from hpcaccel.core.records import RunRecord, to_dict
from hpcaccel.core.registered_runs import register
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.run_index import SETTLING_SECONDS

VIEWERS = 200
SQUEUE = "45|RUNNING|gpu|me|n1|1|2026-11-20T10:00:00|N/A|2026-11-20T09:00:00|1:00:00|None|long"


def seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def read_plainly(*paths: Path) -> None:
    """Parse each line of these files once."""
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                json.loads(line)


def long_run(place: Path, lines: int) -> RunDir:
    """A run in the queue of the stand-in, with one attempt and a long metrics file."""
    run = RunDir(place / "runs" / "long" / "20261120-153012-4f2a")
    run.create()
    now = time.time()
    record = RunRecord(
        run_id=run.run_id, name="long", backend="slurm", cluster="slurm", job_ids=["45"], created=now - 5000
    )
    run.record.write_text(json.dumps(to_dict(record)))
    run.attempt(1).mkdir(parents=True)
    start = {
        "event": "start", "version": 1, "attempt": 1, "time": now - 4000, "job_id": "45", "nodes": ["n1"], "ranks": 1,
    }  # fmt: skip
    run.ledger.write_text(json.dumps(start) + "\n")
    chance = random.Random(1)
    with run.metrics.open("w") as file:
        for step in range(lines):
            values = {"loss": chance.random(), "lr": 1e-3}
            line = {"step": step, "attempt": 1, "time": now - 3000 + step / 1000, "epoch": 0, "values": values}
            file.write(json.dumps(line) + "\n")
    register(run, name="long", job_id="45")
    return run


class Service:
    """``hpcaccel serve`` on a Unix socket, with a stand-in for squeue that counts its calls."""

    def __init__(self, place: Path) -> None:
        self.calls = place / "calls"
        self.calls.touch()
        (place / "bin").mkdir(exist_ok=True)
        for name, text in (("squeue", f"echo >> {self.calls}; echo '{SQUEUE}'"), ("sbatch", "echo 45")):
            (place / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (place / "bin" / name).chmod(0o755)
        self.socket = place / "socket"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hpcaccel", "serve", "--socket", str(self.socket)],
            cwd=place, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.client().clusters()

    def client(self) -> Client:
        return Client(socket=self.socket, timeout_seconds=600)

    def memory(self) -> int:
        """Resident memory, in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def view(service: Service, run: RunDir, until: float, waits: list[float]) -> None:
    """One viewer, who looks every five seconds."""
    with service.client() as client:
        while time.monotonic() < until:
            waits.append(seconds(lambda: (client.run(run.run_id), client.metrics(run.run_id), client.runs(limit=5))))
            time.sleep(5)


class Limits:
    def __init__(self) -> None:
        self.exceeded = False

    def check(self, what: str, value: float, limit: float, unit: str) -> None:
        self.exceeded |= value > limit
        print(f"{what}: {value:.3g} {unit} (limit {limit:g}){' EXCEEDED' if value > limit else ''}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args()
    limits = Limits()
    with tempfile.TemporaryDirectory(prefix="hpcaccel-service-") as folder:
        place = Path(folder)
        os.environ.update(XDG_STATE_HOME=str(place / "state"), XDG_CONFIG_HOME=str(place / "config"), HOME=folder)
        for number in range(asked.runs):
            make_run(place / "runs", number)
        time.sleep(SETTLING_SECONDS + 1)
        files = [path for name in ("attempts.jsonl", "metrics.jsonl") for path in place.glob(f"runs/*/*/{name}")]
        plain = seconds(lambda: read_plainly(*files))
        subprocess.run([sys.executable, "-m", "hpcaccel", "list", "--all"], cwd=place, capture_output=True, check=True)

        service = Service(place)
        client = service.client()
        first = seconds(client.runs)
        print(f"reading the ledgers and metrics of {asked.runs} runs once: {plain:.2f} s")
        limits.check("first page", first, 1.0, "s")
        limits.check("first page, of reading the runs once", first / plain, 0.5, "")
        print(f"the second time: {seconds(client.runs):.3f} s")
        print(f"first page of failed runs, all rows read: {seconds(lambda: client.runs(state='failed')):.2f} s")
        print(f"the second time: {seconds(lambda: client.runs(state='failed')):.3f} s")

        service.stop()

        run = long_run(place, asked.lines)
        service = Service(place)
        client = service.client()
        once = seconds(lambda: read_plainly(run.metrics))
        print(f"first page with a running run of {asked.lines} lines: {seconds(client.runs):.2f} s")
        curve = seconds(lambda: client.metrics(run.run_id, ["loss"]))
        print(f"reading {asked.lines} lines of metrics once: {once:.2f} s")
        limits.check("first curve, of reading the file once", curve / once, 3.0, "")
        later = statistics.median(seconds(lambda: client.metrics(run.run_id, ["loss"])) for _ in range(5))
        limits.check("a later curve", later, 0.5, "s")

        client.run(run.run_id)
        before, calls, waits = service.memory(), len(service.calls.read_text()), list[float]()
        until = time.monotonic() + asked.seconds
        threads = [threading.Thread(target=view, args=(service, run, until, waits)) for _ in range(VIEWERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asked_slurm = len(service.calls.read_text()) - calls
        print(f"{VIEWERS} viewers, {len(waits)} looks (three requests each): median {statistics.median(waits):.2f} s")
        limits.check("squeue a minute", asked_slurm / max(1.0, asked.seconds / 60 + 1), 1.0, "calls")
        limits.check("more memory", (service.memory() - before) / 2**20, 32, "MB")
        service.stop()
    sys.exit(1 if limits.exceeded else 0)


if __name__ == "__main__":
    main()
