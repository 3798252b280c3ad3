"""The best trial of a sweep, and its spec as a file for ``submit``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunDirectoryError, UserError
from hpcaccel.spec import JobSpec, to_yaml
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_notes import FROM
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Goal, Point, pareto_front, ranking
from hpcaccel.sweeps.sweep_overview import Study

__all__ = ["BestTrial", "choose"]


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """A trial selected from a sweep."""

    sweep: SweepDir
    trial: int
    values: dict[str, float]
    """The value of each metric: the mean over ``seeds`` trials of the same point."""
    params: dict[str, object]
    spec: JobSpec
    """The trial's spec, including its seed, but without the checkpoint that a continued trial started from."""
    went_on_from: int | None = None
    """Number of the ended trial that this trial continued; None if it continued none."""
    seeds: int = 1
    """Number of trials over which the values are averaged."""

    @property
    def path(self) -> Path:
        """The trial's run directory."""
        return self.sweep.trial(self.trial).path

    def to_yaml(self) -> str:
        """The text of a spec file, with comments about its origin."""
        values = ", ".join(f"{name} {value:.6g}" for name, value in self.values.items())
        several = f" (mean of {self.seeds} seeds)" if self.seeds > 1 else ""
        lines = [f"Trial {self.trial} of sweep {self.sweep.run_id}: {values}{several}", *self._about_code()]
        if self.went_on_from is not None:
            lines.append(f"It continued trial {self.went_on_from}; a run of this spec starts from scratch.")
        return "".join(f"# {line}\n" for line in lines) + to_yaml(self.spec)

    def _about_code(self) -> list[str]:
        if not self.sweep.code.exists():
            return []
        record = read_record(self.sweep)
        commit = f", at commit {record.git_commit}{' with local changes' if record.git_dirty else ''}"
        return [f"The code that it ran is in {self.sweep.code}{commit if record.git_commit else ''}"]


def choose(sweep: SweepDir, *, trial: int | None = None, metric: str | None = None) -> BestTrial:
    """The best trial of a sweep.

    Args:
        trial: number of a trial to select instead of the best one, whatever its state.
        metric: the metric to rank by, if the sweep has several.

    Raises:
        UserError: the trial or the metric does not exist, no trial is complete, or the sweep has several metrics and
            neither a trial nor a metric was selected.
        RunDirectoryError: the selected trial never started, or ``sweep`` is not a sweep directory.
    """
    study = Study(sweep).read()
    if metric is not None and metric not in study.goal.metrics:
        raise UserError(f"{metric!r} is not a metric of the sweep (allowed: {', '.join(study.goal.metrics)})")
    if trial is not None:
        return _winner(sweep, study, _alone(sweep, study, trial))
    finished = [point for point in ranking(study.trials, study.goal) if point.complete]
    if not finished:
        raise UserError(
            f"sweep {sweep.run_id} has no complete trial yet, so there is no best one. Select any trial with --trial"
        )
    if len(study.goal.metrics) == 1:
        return _winner(sweep, study, finished[0])
    if metric is None:
        raise UserError(_describe_front(study))
    place = study.goal.metrics.index(metric)
    return _winner(sweep, study, min(finished, key=lambda point: study.goal.cost(point.values)[place]))


def _alone(sweep: SweepDir, study: Study, number: int) -> Point:
    known = {trial.number: trial for trial in study.trials}
    if number not in known:
        newest = f"its newest is {max(known)}" if known else "it has none yet"
        raise UserError(f"sweep {sweep.run_id} has no trial {number} ({newest})")
    record = known[number]
    values = tuple(record.values or ())
    return Point(params=record.params, values=values, trials=[record], complete=0, is_whole=False)


def _describe_front(study: Study) -> str:
    front = pareto_front(study.trials, study.goal)
    lines = [f"  trial {point.trial.number}: {_values(point, study.goal)}" for point in front]
    return "\n".join(
        [
            "with several metrics, no single trial is best. Select one with --trial or --metric:",
            *lines,
        ]
    )


def _values(point: Point, goal: Goal) -> str:
    pairs = zip(goal.metrics, point.values, strict=True)
    return ", ".join(f"{name} {value:.6g}" for name, value in pairs)


def _winner(sweep: SweepDir, study: Study, point: Point) -> BestTrial:
    record = point.trial
    return BestTrial(
        sweep=sweep,
        trial=record.number,
        values=dict(zip(study.goal.metrics, point.values, strict=False)),
        params=dict(record.params),
        spec=_spec(sweep, record),
        went_on_from=record.user_attrs.get(FROM),
        seeds=max(1, point.complete),
    )


def _spec(sweep: SweepDir, record: TrialRecord) -> JobSpec:
    """The trial's spec, without the checkpoint that a continued trial started from."""
    document = read_json(sweep.trial(record.number).spec)
    if document is None:
        raise RunDirectoryError(
            f"trial {record.number} of sweep {sweep.run_id} has no directory, because it never started"
        )
    spec = JobSpec.model_validate(document["spec"])
    if FROM not in record.user_attrs:
        return spec
    own = read_definition(sweep).spec.job.checkpoint.resume
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"resume": own})})
