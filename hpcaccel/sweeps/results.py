"""What a sweep has found: which points are best, and a row for every trial."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcaccel.sweeps.journal_reader import STATES, State, TrialRecord
from hpcaccel.sweeps.trial_attrs import SETTINGS, point_number

__all__ = [
    "ATTEMPTS",
    "GPU_SECONDS",
    "STEPS",
    "VALUE_STEP",
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

GPU_SECONDS, STEPS, ATTEMPTS = "gpu_seconds", "steps", "attempts"
"""What a chooser says of a trial that has ended, in the trial's user attributes."""
VALUE_STEP = "value_step"
"""At which step the first metric had the value that the trial was told with."""

OWN_COLUMNS = frozenset({"trial", "state", "step", "seconds", "gpu_seconds", "worker", "attempts"})
"""A metric of such a name has the column ``metric.<name>``."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What decides in a sweep."""

    metrics: tuple[str, ...]
    modes: tuple[Literal["min", "max"], ...]
    repeat: int = 1

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Goal:
        """From the section ``sweep`` of a spec, as it stands in ``sweep.json``."""
        metric: Any = section["metric"]
        mode: Any = section.get("mode", "min")
        metrics: list[str] = [metric] if isinstance(metric, str) else metric
        modes: list[Any] = [mode] if isinstance(mode, str) else mode
        return cls(metrics=tuple(metrics), modes=tuple(modes), repeat=section.get("repeat", 1))

    def cost(self, values: Sequence[float]) -> tuple[float, ...]:
        """The values such that less is better; what is no number is worse than any."""
        signed = (value if mode == "min" else -value for value, mode in zip(values, self.modes, strict=True))
        return tuple(math.inf if math.isnan(value) else value for value in signed)


@dataclass(slots=True, kw_only=True)
class Point:
    """A point of the space with all its trials: one, or as many as ``repeat`` says."""

    params: dict[str, Any]
    values: tuple[float, ...]
    """One for each metric: the mean over the trials that are complete; of a pruned one what it had come to."""
    trials: list[TrialRecord] = field(repr=False)
    """Those that ``values`` are the mean of, the best one first."""
    complete: int
    """How many of the trials ran to their end."""
    is_whole: bool
    """Whether they are as many as ``repeat`` says."""
    ended_early: list[TrialRecord] = field(default_factory=list, repr=False)
    """Those of its trials that did not run to their end, but have a value."""
    on_front: bool = False
    """Whether no other point is better in one metric and at least as good in all others."""

    @property
    def trial(self) -> TrialRecord:
        """The one to show, or to go on with."""
        return self.trials[0]


def counts(trials: Iterable[TrialRecord]) -> dict[State, int]:
    """How many trials are in each state."""
    found = dict.fromkeys(STATES, 0)
    for trial in trials:
        found[trial.state] += 1
    return found


def ranking(trials: Iterable[TrialRecord], goal: Goal) -> list[Point]:
    """All points that have a value, the best one first.

    Points of which every seed is complete come before those that lack some, and these before pruned ones, of which the
    one that came furthest leads. With several metrics the front comes first; the first metric orders the others.
    """
    points = [_point(group, goal) for group in _by_point(trials, goal)]
    points.sort(key=lambda point: _order(point, goal))
    for point in _front(points, goal):
        point.on_front = True
    if len(goal.metrics) > 1:
        points.sort(key=lambda point: not point.on_front)  # stable
    return points


def best(trials: Iterable[TrialRecord], goal: Goal) -> Point | None:
    """The best point of which a trial is complete; with several metrics, the best in the first one among the front."""
    return next(iter(ranking(_complete(trials), goal)), None)


def pareto_front(trials: Iterable[TrialRecord], goal: Goal) -> list[Point]:
    """The points that no other one is better than in every respect, ordered by the first metric."""
    return [point for point in ranking(_complete(trials), goal) if point.on_front]


def best_first(trials: Iterable[TrialRecord], goal: Goal) -> list[int]:
    """Numbers of all complete trials, those of the best points first."""
    return [trial.number for point in ranking(_complete(trials), goal) for trial in point.trials]


def rows(
    trials: Iterable[TrialRecord],
    goal: Goal,
    *,
    workers: Mapping[int, int] | None = None,
    is_over: bool = False,
) -> list[dict[str, Any]]:
    """A row for every trial, by number: ``trial``, ``state``, one column a metric and one a parameter, ``step`` (at
    which the values were logged), ``seconds``, ``gpu_seconds``, ``worker``, ``attempts``. What is not known is None.

    Args:
        workers: which worker a trial belongs to, by the trial's number.
        is_over: no worker is at work: what has begun and not ended is ``interrupted``, not ``running``.
    """
    trials = list(trials)
    paths = list(dict.fromkeys(path for trial in trials for path in trial.params))
    return [_row(trial, goal, paths, workers or {}, is_over=is_over) for trial in trials]


def parameters(table: Sequence[Mapping[str, Any]], goal: Goal) -> list[str]:
    """Those columns of :func:`rows` that are parameters of the search."""
    others = OWN_COLUMNS | {_column(name) for name in goal.metrics}
    return [title for title in (table[0] if table else ()) if title not in others]


def to_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows with a head line; lists and the like in JSON, nothing for None."""
    buffer = io.StringIO()
    if table:
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(table[0])
        writer.writerows([_cell(value) for value in row.values()] for row in table)
    return buffer.getvalue()


def to_json(table: Sequence[Mapping[str, Any]]) -> str:
    """A list of objects; numbers that JSON has no word for (a loss that became NaN) are null."""
    clean = [{key: _finite(value) for key, value in row.items()} for row in table]
    return json.dumps(clean, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _complete(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if trial.state == "complete"]


def _by_point(trials: Iterable[TrialRecord], goal: Goal) -> list[list[TrialRecord]]:
    """Trials that differ in nothing but their seed, together."""
    groups: dict[tuple[int, str], list[TrialRecord]] = {}
    for trial in trials:
        if trial.values and len(trial.values) == len(goal.metrics) and trial.state in ("complete", "pruned"):
            groups.setdefault(_key(trial, goal), []).append(trial)
    return list(groups.values())


def _key(trial: TrialRecord, goal: Goal) -> tuple[int, str]:
    """What the seeds of a point have in common. One that was given more to do is none of them."""
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
    """Of points that are ordered by their cost, and so never dominated by a later one that is not their equal."""
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
    """At which the values were logged; of a trial without values, how far it came."""
    if trial.state == "pruned" and trial.step is not None:
        return trial.step  # its value is the last one that was reported, and the program may have gone on
    known = trial.user_attrs.get(VALUE_STEP, trial.user_attrs.get(STEPS, trial.step))
    return None if known is None else int(known)


def _column(metric: str) -> str:
    return f"metric.{metric}" if metric in OWN_COLUMNS else metric


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
