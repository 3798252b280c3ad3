"""Everything that pages and reports show of one sweep, as plain data, read without Optuna."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.submission.runs.status import status as status_of
from hpcaccel.sweeps.analysis import rungs
from hpcaccel.sweeps.compute_account import ComputeAccount
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import best_first, rows
from hpcaccel.sweeps.sweep_overview import Study, SweepOverview, SweepSummary, sweep_overview
from hpcaccel.view.kept_readings import KeptReadings
from hpcaccel.view.metric_buckets import metrics_buckets
from hpcaccel.view.sweep_importances import kept_importances

__all__ = ["BestPoint", "RungCount", "SweepView", "TrialCurve", "sweep_view"]

MOST_SWEEPS = 50
"""Maximum number of sweeps whose journals a process keeps."""
MOST_CURVES = 200
"""Maximum number of curves: those of the best trials, of the running ones, and an even selection of the rest."""
POINTS = 100
"""Maximum number of points of a curve."""


@dataclass(frozen=True, kw_only=True)
class BestPoint:
    """The best trial so far."""

    number: int
    value: float
    """Value of the first metric; with several seeds, their mean."""
    values: dict[str, float]
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RungCount:
    """A step at which the pruner compares trials."""

    step: int
    entered: int
    """Number of trials that reached the step."""
    promoted: int
    """Those that were not pruned there, including trials that are still running."""


@dataclass(frozen=True, kw_only=True)
class TrialCurve:
    """Learning curve of one trial."""

    trial: int
    state: str
    points: list[tuple[int, float]]
    """Steps and values of the first metric; of a long curve, means of ranges of steps."""


@dataclass(frozen=True, kw_only=True)
class SweepView(SweepSummary):
    """State, results and plots of one sweep."""

    best: BestPoint | None
    metric: str
    """The first metric."""
    direction: str
    """``min`` or ``max``, of the first metric."""
    budget_gpu_hours: float | None
    best_so_far: list[tuple[float, float]] = field(default_factory=list)
    """GPU-hours of the sweep and the best value of a complete trial at that time, a point per improvement."""
    rungs: list[RungCount] = field(default_factory=list)
    curves: list[TrialCurve] = field(default_factory=list)
    importances: dict[str, float] = field(default_factory=dict)
    """Share of each parameter in the differences between trials, largest first; empty if not known (yet)."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """A row for each trial: trial, state, metrics, parameters, step, seconds, gpu_seconds, worker, attempts."""


class _KeptSweep:
    """A sweep's journal and account, read incrementally."""

    def __init__(self, run: Any) -> None:
        sweep = SweepDir(run.path)
        self.study = Study(sweep)
        self.account = ComputeAccount(sweep, ranks=self.study.ranks)


_SWEEPS = KeptReadings(_KeptSweep, most=MOST_SWEEPS)


def sweep_view(
    sweep: SweepDir,
    status: RunStatus | None = None,
    *,
    wait_for_importances: bool = False,
    now: float | None = None,
) -> SweepView:
    """The view of a sweep. Journals and metrics files are read once per process, later only their new lines.

    Args:
        status: the status of its workers. Default: from the shared squeue cache, at most a minute old.
        wait_for_importances: whether to compute the importances first. They take a second or more, in a child process
            (Optuna computes them); by default they are computed meanwhile, and a later view has them.

    Raises:
        RunDirectoryError: ``sweep`` is not the directory of a sweep.
    """
    now = time.time() if now is None else now
    status = status_of(sweep, patient=True) if status is None else status
    with _SWEEPS.of(sweep) as kept:
        study, account = kept.study.read(), kept.account.read()
        summary = sweep_overview(study, status, now=now)
        trials, goal = study.trials, study.goal
        reached = [
            RungCount(step=r.step, entered=r.reached, promoted=r.reached - r.ended) for r in rungs(sweep, trials)
        ]
        return SweepView(
            **_summary(summary),
            best_so_far=list(_best_so_far(trials, account, goal.modes[0], now)),
            rungs=reached,
            curves=_curves(sweep, trials, best_first(trials, goal), goal.metrics[0]),
            importances=kept_importances(sweep, trials, wait=wait_for_importances),
            rows=rows(trials, goal, workers=study.workers(), is_over=status.ended),
        )


def _summary(now: SweepOverview) -> dict[str, Any]:
    best = now.best
    point = None
    if best is not None:
        value = best.values[now.metrics[0]]
        point = BestPoint(number=best.trial, value=value, values=best.values, params=best.params)
    same = {one.name: getattr(now, one.name) for one in fields(SweepSummary)}
    return {
        **same,
        "best": point,
        "metric": now.metrics[0],
        "direction": now.modes[0],
        "budget_gpu_hours": now.max_gpu_hours,
    }


def _best_so_far(
    trials: Sequence[TrialRecord], account: ComputeAccount, mode: str, now: float
) -> Iterator[tuple[float, float]]:
    """GPU-hours and value at each improvement of the first metric by a complete trial."""
    ended = [
        (trial.ended, trial.values[0])
        for trial in trials
        if trial.state == "complete" and trial.values and trial.ended is not None and math.isfinite(trial.values[0])
    ]
    changes: list[tuple[float, int]] = []
    for stays in account.held.values():
        for stay in stays:
            changes += [(stay.began, account.gpus(stay)), (stay.began + stay.seconds(now), -account.gpus(stay))]
    changes.sort()
    best, spent, gpus, at, place = None, 0.0, 0, 0.0, 0
    for when, value in sorted(ended):
        while place < len(changes) and changes[place][0] <= when:
            spent += gpus * (changes[place][0] - at)
            at, gpus = changes[place][0], gpus + changes[place][1]
            place += 1
        spent += gpus * max(0.0, when - at)
        at = max(at, when)
        if best is None or (value < best if mode == "min" else value > best):
            best = value
            yield spent / 3600, value


def _curves(sweep: SweepDir, trials: Sequence[TrialRecord], leaders: Sequence[int], metric: str) -> list[TrialCurve]:
    begun = {trial.number: trial for trial in trials if trial.started is not None}
    wanted = [number for number in leaders if number in begun][: MOST_CURVES // 2]
    wanted += [number for number, trial in begun.items() if trial.state == "running"]
    chosen = dict.fromkeys(wanted[:MOST_CURVES])
    others = [number for number in begun if number not in chosen]
    room = min(len(others), MOST_CURVES - len(chosen))
    chosen |= dict.fromkeys(others[place * len(others) // room] for place in range(room))
    found = []
    for number in sorted(chosen):
        buckets = metrics_buckets(sweep.trial(number), [metric], POINTS)[metric]
        points = [(bucket.step_last, bucket.mean) for bucket in buckets] or sorted(begun[number].intermediate.items())
        if points:
            found.append(TrialCurve(trial=number, state=begun[number].state, points=points))
    return found
