"""Logged values of a run over its steps, across attempts: one line that counts, and the parts that were repeated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hpcaccel.core import metrics_reader
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.attempts import Attempt

__all__ = ["RunCurves", "StepCurve", "thinned"]

MOST_POINTS = 600
"""A curve with more points is drawn with this many, each the mean of its neighbours, and an area from the lowest to the
highest value."""
PACE_POINTS = 120
"""Number of points of the curve of steps per second."""


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """Values by step; ``band`` has the lowest and the highest value of each point if there were too many to draw."""

    points: list[tuple[float, float]]
    band: list[tuple[float, float, float]] = field(default_factory=list)


class RunCurves:
    """The metrics of ``run``, read once.

    Args:
        attempts: the run's attempts, for the steps from which they continued.
    """

    def __init__(self, run: RunDir, attempts: Sequence[Attempt]) -> None:
        self._by_attempt: dict[int, list[metrics_reader.Line]] = {}
        for line in Logged(run).read():
            self._by_attempt.setdefault(line.attempt, []).append(line)
        for lines in self._by_attempt.values():
            lines.sort(key=lambda line: line.step)
        self._from = {one.number: one.resumed_step for one in attempts if one.resumed_step is not None}
        for number, lines in self._by_attempt.items():
            self._from.setdefault(number, lines[0].step - 1)

    def names(self) -> list[str]:
        """Names of all logged metrics, in the order of their first value."""
        return list(dict.fromkeys(name for _, lines in self._sorted() for line in lines for name in line.values))

    def kept(self, name: str) -> StepCurve:
        """The values that count: for each step those of the newest attempt."""
        return thinned([point for number, lines in self._sorted() for point in self._part(number, lines, name, True)])

    def repeated(self, name: str) -> list[StepCurve]:
        """The values of steps that a later attempt repeated, one curve per attempt."""
        parts = (self._part(number, lines, name, False) for number, lines in self._sorted())
        return [thinned(points) for points in parts if points]

    def pace(self) -> StepCurve:
        """Steps per second by step, from the times of the logged lines."""
        total = sum(map(len, self._by_attempt.values()))
        width = max(1, total // PACE_POINTS)
        points: list[tuple[float, float]] = []
        for number, lines in self._sorted():
            own = [line for line in lines if line.step <= self._until(number)]
            ends = own[::width] if (len(own) - 1) % width == 0 else [*own[::width], own[-1]]
            for before, after in pairwise(ends):
                seconds, steps = after.time - before.time, after.step - before.step
                if seconds > 0 and steps > 0:
                    points.append((after.step, steps / seconds))
        return StepCurve(points=points)

    def _sorted(self) -> list[tuple[int, list[metrics_reader.Line]]]:
        return sorted(self._by_attempt.items())

    def _until(self, number: int) -> float:
        return min((step for later, step in self._from.items() if later > number), default=math.inf)

    def _part(
        self, number: int, lines: Iterable[metrics_reader.Line], name: str, kept: bool
    ) -> list[tuple[float, float]]:
        until = self._until(number)
        return [
            (line.step, line.values[name]) for line in lines if name in line.values and (line.step <= until) is kept
        ]


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> StepCurve:
    """A curve of at most ``most`` points. Values that are not finite are left out."""
    finite = sorted((x, y) for x, y in points if math.isfinite(y))
    if len(finite) <= most:
        return StepCurve(points=finite)
    every = -(-len(finite) // most)
    groups = [finite[place : place + every] for place in range(0, len(finite), every)]
    middle = [(group[len(group) // 2][0], [y for _, y in group]) for group in groups]
    return StepCurve(
        points=[(x, sum(ys) / len(ys)) for x, ys in middle], band=[(x, min(ys), max(ys)) for x, ys in middle]
    )
