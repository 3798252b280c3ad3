"""The best trial as a spec file: what ``submit`` takes, and what gives the same training once more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.run_dir import SweepDir, read_json
from hpcaccel.errors import RunDirectoryError, UserError
from hpcaccel.spec import JobSpec, to_yaml
from hpcaccel.submission.run_state import read_record
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Goal, Point, pareto_front, ranking
from hpcaccel.sweeps.sweep_overview import Study
from hpcaccel.sweeps.trial_attrs import FROM

__all__ = ["Winner", "choose"]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """A trial that was chosen from a sweep."""

    sweep: SweepDir
    trial: int
    values: dict[str, float]
    """By metric; of several seeds the mean."""
    params: dict[str, object]
    spec: JobSpec
    """With the seed that it had; it starts from the beginning."""
    went_on_from: int | None = None
    """The trial whose checkpoint it began with."""
    seeds: int = 1
    """Of how many trials the values are the mean."""

    @property
    def path(self) -> Path:
        """The trial's run directory."""
        return self.sweep.trial(self.trial).path

    def to_yaml(self) -> str:
        """A spec file, with comments that say where it comes from."""
        values = ", ".join(f"{name} {value:.6g}" for name, value in self.values.items())
        several = f" (mean of {self.seeds} seeds)" if self.seeds > 1 else ""
        lines = [f"Trial {self.trial} of sweep {self.sweep.run_id}: {values}{several}", *self._about_code()]
        if self.went_on_from is not None:
            lines.append(f"It went on from the checkpoint of trial {self.went_on_from}; this spec starts anew.")
        return "".join(f"# {line}\n" for line in lines) + to_yaml(self.spec)

    def _about_code(self) -> list[str]:
        if not self.sweep.code.exists():
            return []
        record = read_record(self.sweep)
        commit = f", at commit {record.git_commit}{' with changes' if record.git_dirty else ''}"
        return [f"The code as it ran is in {self.sweep.code}{commit if record.git_commit else ''}"]


def choose(sweep: SweepDir, *, trial: int | None = None, metric: str | None = None) -> Winner:
    """The best trial of a sweep.

    Args:
        trial: this one, whatever came of it.
        metric: of several, the one that decides.

    Raises:
        UserError: nothing has finished yet, there is no such trial or metric, or several metrics leave it open.
    """
    study = Study(sweep).read()
    if metric is not None and metric not in study.goal.metrics:
        raise UserError(f"metric {metric!r} is not one of the sweep's ({', '.join(study.goal.metrics)})")
    if trial is not None:
        return _winner(sweep, study, _alone(sweep, study, trial))
    finished = [point for point in ranking(study.trials, study.goal) if point.complete]
    if not finished:
        raise UserError(f"no trial of sweep {sweep.run_id} has finished yet: there is no best one")
    if len(study.goal.metrics) == 1:
        return _winner(sweep, study, finished[0])
    if metric is None:
        raise UserError(_front_in_words(study))
    place = study.goal.metrics.index(metric)
    return _winner(sweep, study, min(finished, key=lambda point: study.goal.cost(point.values)[place]))


def _alone(sweep: SweepDir, study: Study, number: int) -> Point:
    known = {trial.number: trial for trial in study.trials}
    if number not in known:
        raise UserError(f"sweep {sweep.run_id} has no trial {number} (it has {len(known)})")
    record = known[number]
    values = tuple(record.values or ())
    return Point(params=record.params, values=values, trials=[record], complete=0, is_whole=False)


def _front_in_words(study: Study) -> str:
    lines = [f"  trial {point.trial.number}: {_values(point, study.goal)}" for point in _front(study)]
    return "\n".join(
        ["several metrics leave it open which trial is best. Choose with --trial or --metric from:", *lines]
    )


def _front(study: Study) -> list[Point]:
    return pareto_front(study.trials, study.goal)


def _values(point: Point, goal: Goal) -> str:
    pairs = zip(goal.metrics, point.values, strict=True)
    return ", ".join(f"{name} {value:.6g}" for name, value in pairs)


def _winner(sweep: SweepDir, study: Study, point: Point) -> Winner:
    record = point.trial
    return Winner(
        sweep=sweep,
        trial=record.number,
        values=dict(zip(study.goal.metrics, point.values, strict=False)),
        params=dict(record.params),
        spec=_spec(sweep, record),
        went_on_from=record.user_attrs.get(FROM),
        seeds=max(1, point.complete),
    )


def _spec(sweep: SweepDir, record: TrialRecord) -> JobSpec:
    """What the trial ran with, but for the checkpoint that a command gave it to begin with."""
    document = read_json(sweep.trial(record.number).spec)
    if document is None:
        raise RunDirectoryError(f"trial {record.number} of sweep {sweep.run_id} has no directory: it never began")
    spec = JobSpec.model_validate(document["spec"])
    if FROM not in record.user_attrs:
        return spec
    own = read_definition(sweep).spec.job.checkpoint.resume
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"resume": own})})
