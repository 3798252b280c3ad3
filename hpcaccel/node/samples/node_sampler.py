"""The sampler process of a node: reads CPUs, memory, disks and GPUs every 15 s, and appends a line to the node's file.

It runs at the lowest priority. It ends with its supervisor, or if a later attempt has begun.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpcaccel.core.durable_files import append_line, atomic_write, json_line, read_lines
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.samples import Sample, merge
from hpcaccel.core.step_counter import read_counter
from hpcaccel.node.samples.gpu_usage import GpuReader, load_nvml
from hpcaccel.node.samples.host_usage import HostReader
from hpcaccel.node.samples.job_processes import JobProcesses

__all__ = ["INTERVAL", "LIMIT_BYTES", "SampleFile", "interval_seconds", "sample_here"]

INTERVAL = "HPCACCEL_SAMPLE_SECONDS"
"""Environment variable: seconds between two samples; 0 for no samples."""
INTERVAL_SECONDS = 15.0
LIMIT_BYTES = 512_000
"""Maximum size of a node's file."""
ALL_BYTES = 16_000_000
"""Size of the files of all nodes together from which the limit of each is lower, so that they are read in a second."""
LEAST_BYTES = 64_000
"""Lowest limit of a node's file."""
KEPT_SHARE = 4
"""One in this many lines, the newest ones, stay as they are if the file has reached its limit."""


def interval_seconds(env: Mapping[str, str] = os.environ) -> float:
    """Seconds between two samples; 0 for no samples. A value that is no number counts as the default."""
    try:
        wanted = float(env.get(INTERVAL, ""))
    except ValueError:
        return INTERVAL_SECONDS
    return wanted if 0 <= wanted < math.inf else INTERVAL_SECONDS


def sample_here(run: RunDir, attempt: int) -> int:
    """Sample this node until the attempt is over. Returns the exit code.

    Raises:
        RunDirectoryError: ``spec.json`` is missing or unreadable.
    """
    os.nice(19)
    launch, node = read_launch(run), node_name()
    processes = JobProcesses(run)
    whole_job = not run.is_trial  # several trials may share a job
    host = HostReader(processes, os.environ, node=node, local=launch.local, whole_job=whole_job)
    gpus = GpuReader(load_nvml(), processes, os.environ, local=launch.local, whole_job=whole_job)
    limit = max(LEAST_BYTES, min(LIMIT_BYTES, ALL_BYTES // launch.nodes))
    file = SampleFile(run.sample_file(attempt, node), limit=limit)
    interval, last, due = interval_seconds() or INTERVAL_SECONDS, 0.0, time.monotonic()
    while not run.attempt(attempt + 1).exists():
        now = time.monotonic()
        seconds = now - last if last else 0.0
        last = now
        counted = read_counter(run, attempt)
        sample = Sample(
            time=round(time.time(), 3),
            seconds=round(seconds, 3),
            step=None if counted is None else counted[0],
            gpus=gpus.read(seconds),
            **host.read(),
        )
        if not file.append(sample):
            return 0
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
    return 0


class SampleFile:
    """A node's file of samples, of limited size.

    Args:
        limit: maximum size in bytes.
    """

    def __init__(self, path: Path, *, limit: int = LIMIT_BYTES) -> None:
        self._path, self._limit = path, limit
        self._failed = False

    def append(self, sample: Sample) -> bool:
        """Append a line. If the disk is full, the line is left out, and the first such error is reported. Returns False
        if the run directory is gone."""
        try:
            append_line(self._path, to_dict(sample))
            if self._path.stat().st_size > self._limit:
                self._shrink()
        except FileNotFoundError:
            return False
        except OSError as error:
            if not self._failed:
                print(f"hpcaccel: {self._path} could not be written: {error}", file=sys.stderr, flush=True)
            self._failed = True
        return True

    def _shrink(self) -> None:
        lines = [Sample.of(line) for line, _ in read_lines(self._path)]
        count = 2 * ((len(lines) - len(lines) // KEPT_SHARE) // 2)
        first = lines[:1] if lines and not lines[0].seconds else []  # the counters at the start
        older, newer = lines[len(first) : count], lines[count:]
        pairs = [older[at : at + 2] for at in range(0, len(older), 2)]
        merged = [merge(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        atomic_write(self._path, b"".join(json_line(to_dict(one)) for one in [*first, *merged, *newer]), sync=False)
