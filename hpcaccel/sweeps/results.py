"""Results of a sweep: the ranking of its points, and a table of all trials."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcaccel.core.finite_values import finite
from hpcaccel.sweeps.journal_notes import ATTEMPTS, GPU_SECONDS, SETTINGS, STEPS, VALUE_STEP, point_number
from hpcaccel.sweeps.journal_reader import STATES, State, TrialRecord

__all__ = [
    "Goal",
    "Point",
    "best",
    "best_first",
    "counts",
    "parameters",
    "pareto_front",
    "ranking",
    "rows",
    "to_csv",
    "to_json",
]

OWN_COLUMNS = frozenset({"trial", "state", "step", "seconds", "gpu_seconds", "worker", "attempts"})
"""Names of fixed columns. A metric with one of these names gets the column ``metric.<name>``."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The metrics of a sweep and, for each metric, whether smaller or larger values are better."""

    metrics: tuple[str, ...]
    modes: tuple[Literal["min", "max"], ...]
    repeat: int = 1

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Goal:
        """The goal set in ``section``, the ``sweep`` section of ``sweep.json``."""
        metric: Any = section["metric"]
        mode: Any = section.get("mode", "min")
        metrics: list[str] = [metric] if isinstance(metric, str) else metric
        modes: list[Any] = [mode] if isinstance(mode, str) else mode
        return cls(metrics=tuple(metrics), modes=tuple(modes), repeat=section.get("repeat", 1))

    def cost(self, values: Sequence[float]) -> tuple[float, ...]:
        """The values, negated where needed so that lower is better; NaN becomes infinity."""
        signed = (value if mode == "min" else -value for value, mode in zip(values, self.modes, strict=True))
        return tuple(math.inf if math.isnan(value) else value for value in signed)


@dataclass(slots=True, kw_only=True)
class Point:
    """A point of the search space, with its trials."""

    params: dict[str, Any]
    values: tuple[float, ...]
    """One value per metric: the mean over the complete trials; if there are none, the values of the pruned trial that
    ran longest."""
    trials: list[TrialRecord] = field(repr=False)
    """The trials over which ``values`` are averaged, best first."""
    complete: int
    """Number of complete trials."""
    is_whole: bool
    """Whether ``repeat`` trials are complete."""
    ended_early: list[TrialRecord] = field(default_factory=list, repr=False)
    """Pruned trials that have a value."""
    on_front: bool = False
    """Whether the point is on the Pareto front. Points that lack seeds qualify only if no point has all its seeds."""

    @property
    def trial(self) -> TrialRecord:
        """The best of ``trials``. It represents the point in tables."""
        return self.trials[0]


def counts(trials: Iterable[TrialRecord]) -> dict[State, int]:
    """Number of trials in each state."""
    found = dict.fromkeys(STATES, 0)
    for trial in trials:
        found[trial.state] += 1
    return found


def ranking(trials: Iterable[TrialRecord], goal: Goal) -> list[Point]:
    """All points that have a value, best first.

    Points with all seeds complete come first, then those with some, then pruned ones, of which those that ran longest
    come first. With several metrics the points on the Pareto front come before all others, and points are compared by
    the first metric.
    """
    points = [_point(group, goal) for group in _by_point(trials, goal)]
    points.sort(key=lambda point: _order(point, goal))
    for point in _front(points, goal):
        point.on_front = True
    if len(goal.metrics) > 1:
        points.sort(key=lambda point: not point.on_front)  # the sort is stable: otherwise the order is kept
    return points


def best(trials: Iterable[TrialRecord], goal: Goal) -> Point | None:
    """The best point with a complete trial; None if there is none. With several metrics it is the point on the Pareto
    front that is best in the first metric."""
    return next(iter(ranking(_complete(trials), goal)), None)


def pareto_front(trials: Iterable[TrialRecord], goal: Goal) -> list[Point]:
    """The points on the Pareto front, ordered by the first metric."""
    return [point for point in ranking(_complete(trials), goal) if point.on_front]


def best_first(trials: Iterable[TrialRecord], goal: Goal) -> list[int]:
    """Numbers of all complete trials, the best points first."""
    return [trial.number for point in ranking(_complete(trials), goal) for trial in point.trials]


def rows(
    trials: Iterable[TrialRecord],
    goal: Goal,
    *,
    workers: Mapping[int, int] | None = None,
    is_over: bool = False,
) -> list[dict[str, Any]]:
    """A row for each trial, in the given order. The columns are ``trial``, ``state``, one for each metric and each
    parameter, ``step`` (of the values), ``seconds``, ``gpu_seconds``, ``worker`` and ``attempts``. Unknown values are
    None.

    Args:
        workers: the worker of each trial, by the trial's number.
        is_over: whether no worker is active; the state of running trials is then ``interrupted``.
    """
    trials = list(trials)
    paths = list(dict.fromkeys(path for trial in trials for path in trial.params))
    return [_row(trial, goal, paths, workers or {}, is_over=is_over) for trial in trials]


def parameters(table: Sequence[Mapping[str, Any]], goal: Goal) -> list[str]:
    """The columns of :func:`rows` that are parameters of the search."""
    others = OWN_COLUMNS | {_column(name) for name in goal.metrics}
    return [title for title in (table[0] if table else ()) if title not in others]


def to_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV with a header. Lists and dicts are written as JSON, None as an empty cell."""
    buffer = io.StringIO()
    if table:
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(table[0])
        writer.writerows([_cell(value) for value in row.values()] for row in table)
    return buffer.getvalue()


def to_json(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a JSON list of objects; NaN and infinity become null."""
    clean = [finite(dict(row)) for row in table]
    return json.dumps(clean, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _complete(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if trial.state == "complete"]


def _by_point(trials: Iterable[TrialRecord], goal: Goal) -> list[list[TrialRecord]]:
    """Groups of trials that differ only in their seed."""
    groups: dict[tuple[int, str], list[TrialRecord]] = {}
    for trial in trials:
        if trial.values and len(trial.values) == len(goal.metrics) and trial.state in ("complete", "pruned"):
            groups.setdefault(_key(trial, goal), []).append(trial)
    return list(groups.values())


def _key(trial: TrialRecord, goal: Goal) -> tuple[int, str]:
    """A key that all trials of one point share. Trials that were continued with other settings have another key."""
    if goal.repeat == 1:
        return trial.number, ""
    settings = trial.user_attrs.get(SETTINGS) or []
    return point_number(trial.number, trial.user_attrs), json.dumps(settings)


def _point(group: list[TrialRecord], goal: Goal) -> Point:
    complete = _complete(group)
    counted = complete or [max(group, key=lambda trial: trial.step or 0)]
    counted.sort(key=lambda trial: goal.cost(trial.values or ()))
    columns = zip(*(trial.values or () for trial in counted), strict=True)
    return Point(
        params=counted[0].params,
        values=tuple(math.fsum(column) / len(counted) if _adds_up(column) else math.nan for column in columns),
        trials=counted,
        complete=len(complete),
        is_whole=len(complete) >= goal.repeat,
        ended_early=[trial for trial in group if trial.state == "pruned"],
    )


def _adds_up(column: Sequence[float]) -> bool:
    return all(map(math.isfinite, column)) or len(column) == 1


def _order(point: Point, goal: Goal) -> tuple[Any, ...]:
    cost = goal.cost(point.values)
    if point.complete:
        return (not point.is_whole, 0, cost, point.trial.number)
    return (2, -(point.trial.step or 0), cost, point.trial.number)


def _front(points: Sequence[Point], goal: Goal) -> list[Point]:
    """The Pareto front of ``points``, which are ordered by cost, so that no point is dominated by a later one."""
    tier = [point for point in points if point.is_whole] or [point for point in points if point.complete]
    front: list[Point] = []
    costs: dict[tuple[float, ...], None] = {}
    for point in tier:
        cost = goal.cost(point.values)
        if cost in costs or (all(map(math.isfinite, cost)) and not any(_dominates(other, cost) for other in costs)):
            costs[cost] = None
            front.append(point)
    return front


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _row(
    trial: TrialRecord, goal: Goal, paths: Sequence[str], workers: Mapping[int, int], *, is_over: bool
) -> dict[str, Any]:
    values: Sequence[float | None] = trial.values or [None] * len(goal.metrics)
    known = trial.started is not None and trial.ended is not None
    return {
        "trial": trial.number,
        "state": "interrupted" if is_over and trial.state == "running" else trial.state,
        **{_column(name): value for name, value in zip(goal.metrics, values, strict=False)},
        **{path: trial.params.get(path) for path in paths},
        "step": _step(trial),
        "seconds": round((trial.ended or 0.0) - (trial.started or 0.0), 3) if known else None,
        "gpu_seconds": trial.user_attrs.get(GPU_SECONDS),
        "worker": workers.get(trial.number),
        "attempts": trial.user_attrs.get(ATTEMPTS),
    }


def _step(trial: TrialRecord) -> int | None:
    """The step of the values; for a trial without values, its last step."""
    if trial.state == "pruned" and trial.step is not None:
        return trial.step  # the step of its value: the program may have continued after the last report
    known = trial.user_attrs.get(VALUE_STEP, trial.user_attrs.get(STEPS, trial.step))
    return None if known is None else int(known)


def _column(metric: str) -> str:
    return f"metric.{metric}" if metric in OWN_COLUMNS else metric


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
