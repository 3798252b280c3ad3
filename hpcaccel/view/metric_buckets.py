"""Curves of logged metrics, down-sampled to buckets: minimum, maximum and mean of the values in a range of steps.

A curve is one line across attempts: from the first step that an attempt logs, its values replace those of all earlier
attempts. The points of a run's metrics are kept in memory, so that a metrics file is read once per process; a later
curve of the same run reads only the file's new lines.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.run_dir import RunDir
from hpcaccel.view.kept_readings import KeptReadings

__all__ = ["Bucket", "metric_names", "metrics_buckets"]

MOST_POINTS = 16_000_000
"""Maximum number of points (16 bytes each) that a process keeps; the runs that were used longest ago are dropped."""
BUCKETS = 500
"""Default number of buckets."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The values of one metric in a range of steps, of one attempt."""

    step_first: int
    step_last: int
    min: float
    max: float
    mean: float
    attempt: int
    count: int
    """Number of values; those that are not finite are left out."""


@dataclass
class _Points:
    """Steps and finite values of one metric in one attempt, in the order of the steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    is_sorted: bool = True

    def add(self, step: int, value: float) -> None:
        if self.steps and step < self.steps[-1]:
            self.is_sorted = False
        self.steps.append(step)
        self.values.append(value)

    def sort(self) -> None:
        if not self.is_sorted:
            order = sorted(range(len(self.steps)), key=self.steps.__getitem__)
            self.steps = array("q", [self.steps[place] for place in order])
            self.values = array("d", [self.values[place] for place in order])
            self.is_sorted = True


class _Series:
    """All points of a run, by metric and attempt."""

    def __init__(self, run: RunDir) -> None:
        self._logged = Logged(run)
        self.points: dict[str, dict[int, _Points]] = {}
        self.first_step: dict[int, int] = {}
        """The first step that each attempt logged."""
        self.count = 0

    def read(self) -> None:
        for line in self._logged.lines():
            attempt, step = line.attempt, line.step
            if step < self.first_step.setdefault(attempt, step):
                self.first_step[attempt] = step
            for name, value in line.values.items():
                if math.isfinite(value):
                    self.points.setdefault(name, {}).setdefault(attempt, _Points()).add(step, value)
                    self.count += 1

    def parts(self, name: str) -> Iterator[tuple[int, _Points, int]]:
        """Attempt, points, and the number of its first points that no later attempt replaces, oldest attempt first."""
        found = []
        until: float = math.inf
        of_attempt = self.points.get(name, {})
        for attempt in sorted(self.first_step, reverse=True):
            if (points := of_attempt.get(attempt)) is not None:
                points.sort()
                count = len(points.steps) if until == math.inf else bisect_left(points.steps, int(until))
                found.append((attempt, points, count))
            until = min(until, self.first_step[attempt])
        return reversed(found)


_SERIES = KeptReadings(_Series, most=MOST_POINTS, size=lambda series: max(1, series.count))


def metrics_buckets(run: RunDir, names: Sequence[str], buckets: int = BUCKETS) -> dict[str, list[Bucket]]:
    """The curves of the metrics ``names``, each as buckets in the order of the steps.

    Args:
        names: metrics; one that was not logged has no buckets.
        buckets: number of equal ranges of steps. Ranges without values have no bucket; a range with values of two
            attempts has one for each.
    """
    with _SERIES.of(run) as series:
        series.read()
        return {name: list(_curve(series, name, max(1, buckets))) for name in names}


def metric_names(run: RunDir) -> list[str]:
    """The names of all metrics with a finite value, in the order in which they were logged first."""
    with _SERIES.of(run) as series:
        series.read()
        return list(series.points)


def _curve(series: _Series, name: str, buckets: int) -> Iterator[Bucket]:
    parts = [(attempt, points, count) for attempt, points, count in series.parts(name) if count]
    if not parts:
        return
    first = min(points.steps[0] for _, points, _ in parts)
    last = max(points.steps[count - 1] for _, points, count in parts)
    width = (last - first + 1) / buckets
    for attempt, points, count in parts:
        steps, at = points.steps, 0
        while at < count:
            number = int((steps[at] - first) / width)
            edge = math.ceil(first + (number + 1) * width)
            end = max(at + 1, bisect_left(steps, edge, at, count))
            values = points.values[at:end]
            yield Bucket(
                step_first=steps[at],
                step_last=steps[end - 1],
                min=min(values),
                max=max(values),
                mean=math.fsum(values) / len(values),
                attempt=attempt,
                count=len(values),
            )
            at = end
