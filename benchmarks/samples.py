"""Measure what the sampler of a node costs: CPU seconds per hour, and as a share of one core.

    python benchmarks/samples.py [--seconds 0.25] [--samples 120] [--processes 64]

Starts the real sampler of ``node.pyz`` for a run of ``--processes`` waiting processes, as many as the ranks and their
data-loader workers of a node, and samples more often than in a job to get many samples in a short time. The sampler
reads the processes, since no cgroup of a job belongs to it: the expensive case. On a machine with NVIDIA's driver it
reads the GPUs, too. From the CPU time of the process, start included, follows that of an hour with a sample every 15 s:
start + 240 samples. Exits with 1 if that is more than 0.5 % of a core (18 s).
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.samples import read_samples
from hpcaccel.submission.code.package import write_node_program

LIMIT = 0.005
"""Largest share of a core."""
SAMPLES_PER_HOUR = 240


def _run_in(folder: Path) -> RunDir:
    run = RunDir(folder / "run")
    run.create()
    launch: dict[str, Any] = {"kind": "program", "program": ["true"], "workdir": str(folder), "backend": "local"}
    launch |= {"nodes": 1, "ranks_per_node": 1, "stop": "signals"}
    write_json(run.spec, {"version": 1, "spec": {}, "launch": launch})
    write_node_program(run.node_program)
    run.samples(1).mkdir(parents=True)
    return run


def _count(run: RunDir) -> int:
    return sum(len(lines) for lines in read_samples(run, 1).values())


def _cost(run: RunDir, *, seconds: float, samples: int) -> tuple[float, int]:
    """CPU seconds of a sampler until it has taken so many samples, and their number."""
    command = [sys.executable, str(run.node_program), "sample", str(run.path), "1"]
    environment = {**os.environ, "HPCACCEL_SAMPLE_SECONDS": f"{seconds:g}"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    sampler = subprocess.Popen(command, env=environment, cwd="/")
    while _count(run) < samples:
        if sampler.poll() is not None:
            sys.exit(f"the sampler ended with exit code {sampler.returncode}")
        time.sleep(min(1.0, seconds))
    sampler.terminate()
    sampler.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, _count(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.25, help="seconds between two samples")
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--processes", type=int, default=64, help="processes of the run on the node")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = _run_in(Path(folder))
        environment = {**os.environ, "HPCACCEL_RUN_DIR": str(run.path), "RANK": "0"}
        crowd = [subprocess.Popen(["sleep", "3600"], env=environment) for _ in range(chosen.processes)]
        try:
            start, first = _cost(run, seconds=chosen.seconds, samples=1)
            run.sample_file(1, next(iter(read_samples(run, 1)))).unlink()
            used, count = _cost(run, seconds=chosen.seconds, samples=chosen.samples)
            gpus = max(len(line.gpus) for lines in read_samples(run, 1).values() for line in lines)
        finally:
            for process in crowd:
                process.kill()
                process.wait()
    each = max(0.0, used - start) / max(1, count - first)
    hour = start + SAMPLES_PER_HOUR * each
    print(f"processes: {chosen.processes}, GPUs: {gpus}, samples: {count}")
    print(f"start: {start:.2f} CPU s, one sample: {1000 * each:.2f} CPU ms")
    print(f"an hour: {hour:.2f} CPU s, {100 * hour / 3600:.3f} % of a core (limit: {100 * LIMIT:g} %)")
    return int(hour > LIMIT * 3600)


if __name__ == "__main__":
    sys.exit(main())
