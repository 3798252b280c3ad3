"""Continues ended trials: those that failed, those that the budget stopped, and the best ones (also with new settings).

An ended trial is final in Optuna. Its continuation is a new trial with the same point and seed, enqueued in the journal
for the next worker; it starts from the newest checkpoint of the ended trial, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import SpecError, UserError
from hpcaccel.spec import JobSpec, SweepSpec, resolve, spec_from_values
from hpcaccel.spec.loading.expand import escape
from hpcaccel.spec.loading.overrides import setting_path
from hpcaccel.spec.sweep.points import layer_of, point_of
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_notes import BUDGET, CHECKPOINT, ERROR_CLASS, FROM, SETTINGS, is_extended
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Point, ranking
from hpcaccel.sweeps.sweep_overview import Study
from hpcaccel.sweeps.trial_files import pin_source, source_of

if TYPE_CHECKING:
    from hpcaccel.sweeps.study import SweepStudy

__all__ = [
    "ContinuedTrial",
    "continue_stopped",
    "continued",
    "extend",
    "queue_again",
    "retry_failed",
    "stopped_by_budget",
]


@dataclass(frozen=True, kw_only=True)
class ContinuedTrial:
    """An ended trial that was queued to continue."""

    trial: int
    """Number of the ended trial."""
    checkpoint_step: int | None
    """The step from which its continuation starts; None if it starts from scratch."""


def retry_failed(sweep: SweepDir) -> list[ContinuedTrial]:
    """Queue each failed trial again, except those that have already been queued again.

    Raises:
        UserError: no trial has failed, or all failed trials have already been queued again.
        RunDirectoryError: a trial's checkpoint cannot be pinned, or the journal cannot be written.
    """
    study = Study(sweep).read()
    failed = [trial for trial in study.trials if trial.state == "failed"]
    if not failed:
        raise UserError(f"no trial of sweep {sweep.run_id} has failed")
    waiting = _without_successors(failed, study.trials)
    if not waiting:
        raise UserError(f"every failed trial of sweep {sweep.run_id} ({len(failed)}) has already been queued again")
    return _enqueue(sweep, read_definition(sweep).spec, waiting, origin="retry", settings=())


def extend(sweep: SweepDir, top: int, *, settings: Sequence[str] = ()) -> list[ContinuedTrial]:
    """Queue continuations of the trials of the ``top`` best points.

    Args:
        settings: new settings for longer training, such as ``args.epochs=20``. Without settings, only pruned trials can
            continue.

    Raises:
        UserError: there are no trials to continue, or ``top`` is less than 1.
        SpecError: a setting is not valid, or is a parameter of the sweep.
        RunDirectoryError: a trial's checkpoint cannot be pinned, or the journal cannot be written.
    """
    if top < 1:
        raise UserError(f"extend: top is {top}, the number of best points to continue: pass 1 or more")
    spec = read_definition(sweep).spec
    for text in settings:
        _refuse_parameter(spec, text)
    study = Study(sweep).read()
    points = ranking(study.trials, study.goal)
    if not points:
        raise UserError(f"no trial of sweep {sweep.run_id} has a value yet: there is none to extend")
    groups = _with_something_left(points, settings)
    if not groups:
        raise UserError(
            f"no trial of sweep {sweep.run_id} was pruned. To train the complete trials longer, add a setting such as "
            "args.epochs=20"
        )
    if not settings:
        groups = [left for group in groups if (left := _without_successors(group, study.trials))]
    chosen = [trial for group in groups[:top] for trial in group]
    waiting = _without_successors(chosen, study.trials, settings=settings)
    if not waiting:
        what = f"extended with {' '.join(settings)}" if settings else "queued again"
        raise UserError(f"the best trials of sweep {sweep.run_id} have already been {what}")
    for trial in waiting:
        job = resolve(spec, point_of(spec.sweep.parameters, trial.params))
        continued(sweep, job, {FROM: trial.number, SETTINGS: _settings_of(trial, settings)})
    return _enqueue(sweep, spec, waiting, origin="extend", settings=settings)


def continue_stopped(sweep: SweepDir, spec: SweepSpec) -> list[ContinuedTrial]:
    """Queue the trials that were stopped because the budget was used up."""
    waiting = stopped_by_budget(Study(sweep).read().trials)
    return _enqueue(sweep, spec, waiting, origin="budget", settings=()) if waiting else []


def stopped_by_budget(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Trials that were stopped because the budget was used up, and have not been continued since."""
    stopped = [trial for trial in trials if trial.state == "pruned" and trial.user_attrs.get(ERROR_CLASS) == BUDGET]
    return _without_successors(stopped, trials)


def continued(sweep: SweepDir, job: JobSpec, marks: Mapping[str, object]) -> JobSpec:
    """``job`` with the settings and the checkpoint of a continued trial; unchanged for other trials.

    Args:
        marks: the trial's user attributes.

    Raises:
        SpecError: the trial's settings are not valid in the spec.
    """
    if FROM not in marks:
        return job
    values = escape(job.model_dump(mode="json"))
    assert isinstance(values, Mapping)
    settings = marks.get(SETTINGS, [])
    assert isinstance(settings, list)
    result = spec_from_values(values, base=sweep.path, overrides=settings)
    checkpoint = source_of(sweep, marks)
    if checkpoint is None:
        return result
    resume = result.checkpoint.model_copy(update={"resume": str(checkpoint)})
    return result.model_copy(update={"checkpoint": resume})


def _refuse_parameter(spec: SweepSpec, text: str) -> None:
    layer = layer_of(spec.job)
    path = setting_path(text.partition("=")[0], layer)
    for name in spec.sweep.parameters:
        if setting_path(name, layer) == path:
            raise SpecError(f"{text}: {name} is a parameter of the sweep, and each trial keeps its own value")


def _with_something_left(points: Sequence[Point], settings: Sequence[str]) -> list[list[TrialRecord]]:
    """The trials that can continue, grouped by point (one trial for each seed), the best point first."""
    if not settings:
        return [point.ended_early for point in points if point.ended_early]
    groups = ([*point.trials, *point.ended_early] if point.complete else point.ended_early for point in points)
    return [group for group in groups if not _have(group[0], settings)]


def _have(trial: TrialRecord, settings: Sequence[str]) -> bool:
    """Whether the trial was queued with ``settings``, which are then the last of its settings."""
    return _settings_of(trial, ())[-len(settings) :] == list(settings)


def _settings_of(trial: TrialRecord, more: Sequence[str]) -> list[str]:
    return [*trial.user_attrs.get(SETTINGS, []), *more]


def _without_successors(
    trials: Sequence[TrialRecord], everything: Sequence[TrialRecord], *, settings: Sequence[str] = ()
) -> list[TrialRecord]:
    """The ``trials`` that no other trial continues yet. If ``settings`` are given, only continuations with these
    settings count."""
    followers = [trial for trial in everything if FROM in trial.user_attrs]
    followed = {trial.user_attrs[FROM] for trial in followers if not settings or _have(trial, settings)}
    return [trial for trial in trials if trial.number not in followed]


def _enqueue(
    sweep: SweepDir, spec: SweepSpec, trials: Sequence[TrialRecord], *, origin: str, settings: Sequence[str]
) -> list[ContinuedTrial]:
    from hpcaccel.sweeps.study import SweepStudy

    study = SweepStudy.of(sweep, spec)
    found = []
    for trial in trials:
        found.append(queue_again(sweep, study, trial, origin=origin, settings=settings))
    return found


def queue_again(
    sweep: SweepDir, study: SweepStudy, trial: TrialRecord, *, origin: str, settings: Sequence[str] = ()
) -> ContinuedTrial:
    """Queue a continuation of one trial, with the trial's own settings and then ``settings``. The checkpoint that the
    continuation starts from is pinned; ``unpin_source`` removes the pin.

    Raises:
        RunDirectoryError: the checkpoint cannot be pinned.
    """
    checkpoint = pin_source(sweep, trial)
    marks: dict[str, object] = {FROM: trial.number, SETTINGS: _settings_of(trial, settings)}
    if checkpoint is not None:
        marks[CHECKPOINT] = str(checkpoint.relative_to(sweep.path))
    study.enqueue(trial.number, origin="extend" if is_extended(trial.user_attrs) else origin, marks=marks)
    step = None if checkpoint is None else int(checkpoint.name.rpartition("_")[2])
    return ContinuedTrial(trial=trial.number, checkpoint_step=step)
