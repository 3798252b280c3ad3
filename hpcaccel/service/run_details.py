"""Curves and merged logs of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.run_dir import RunDir
from hpcaccel.view.log_reader import Logs

__all__ = ["Bucket", "first_traceback", "merged_log", "metric_names", "metrics_buckets"]


@dataclass(frozen=True)
class Bucket:
    """The finite values of some steps."""

    step_first: int
    step_last: int
    min: float
    max: float
    mean: float
    attempt: int
    count: int


def metric_names(run: RunDir) -> list[str]:
    return sorted({name for line in Logged(run).read() for name in line.values})


def metrics_buckets(run: RunDir, names: list[str], buckets: int) -> dict[str, list[Bucket]]:
    found: dict[str, dict[int, tuple[int, float]]] = {name: {} for name in names}
    for line in Logged(run).read():
        for name in names:
            if name in line.values and math.isfinite(line.values[name]):
                found[name][line.step] = (line.attempt, line.values[name])
    return {name: _curve(found[name], buckets) for name in names}


def _curve(points: dict[int, tuple[int, float]], buckets: int) -> list[Bucket]:
    steps = sorted(points)
    size = max(1, -(-len(steps) // buckets))
    curve = []
    for begin in range(0, len(steps), size):
        part = steps[begin : begin + size]
        values = [points[step][1] for step in part]
        mean = math.fsum(values) / len(values)
        curve.append(Bucket(part[0], part[-1], min(values), max(values), mean, points[part[-1]][0], len(part)))
    return curve


def merged_log(run: RunDir, attempt: int | None, limit: int) -> str:
    lines = b"".join(Logs(run, rank="all", attempt=attempt).new(last=True)).splitlines(keepends=True)
    return b"".join(lines[-limit:]).decode(errors="replace")


def first_traceback(run: RunDir) -> tuple[int, str] | None:
    return None
