"""Trials once more: those that failed, and the best ones with more to do.

A trial that has ended is final in Optuna. What goes on from it is a trial of its own, with the same point and seed,
which waits in the journal for the next worker; it starts from the newest checkpoint that the old one has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcaccel.core.run_dir import SweepDir
from hpcaccel.errors import SpecError, UserError
from hpcaccel.spec import JobSpec, SweepSpec, resolve, spec_from_values
from hpcaccel.spec.expand import escape
from hpcaccel.spec.overrides import setting_path
from hpcaccel.spec.points import point_of
from hpcaccel.spec.trial_spec import layer_of
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Point, ranking
from hpcaccel.sweeps.sources import hold, source_of
from hpcaccel.sweeps.sweep_overview import Study
from hpcaccel.sweeps.trial_attrs import CHECKPOINT, FROM, SETTINGS, is_extended
from hpcaccel.sweeps.trial_result import BUDGET, ERROR_CLASS

if TYPE_CHECKING:
    from hpcaccel.sweeps.study import SweepStudy

__all__ = ["Again", "continue_stopped", "continued", "extend", "queue_again", "retry_failed", "stopped_by_budget"]


@dataclass(frozen=True, kw_only=True)
class Again:
    """A trial that will go on as another one."""

    trial: int
    """The one that has ended."""
    checkpoint_step: int | None
    """Where it goes on; None: at the beginning."""


def retry_failed(sweep: SweepDir) -> list[Again]:
    """Let each failed trial run once more; those that already do are left out.

    Raises:
        UserError: none has failed.
    """
    study = Study(sweep).read()
    failed = [trial for trial in study.trials if trial.state == "failed"]
    if not failed:
        raise UserError(f"no trial of sweep {sweep.run_id} has failed")
    waiting = _without_successors(failed, study.trials)
    if not waiting:
        raise UserError(f"all {len(failed)} failed trials of sweep {sweep.run_id} have been queued again before")
    return _enqueue(sweep, read_definition(sweep).spec, waiting, origin="retry", settings=())


def extend(sweep: SweepDir, top: int, *, settings: Sequence[str] = ()) -> list[Again]:
    """Let the best ``top`` trials go on.

    Args:
        settings: what they have more to do with, such as ``args.epochs=20``. Without any, only trials that were ended
            early have something left to do.

    Raises:
        UserError: there are no such trials.
        SpecError: a setting is none, or one of the parameters.
    """
    spec = read_definition(sweep).spec
    for text in settings:
        _refuse_parameter(spec, text)
    study = Study(sweep).read()
    points = ranking(study.trials, study.goal)
    if not points:
        raise UserError(f"no trial of sweep {sweep.run_id} has a value yet")
    groups = _with_something_left(points, settings)
    if not groups:
        raise UserError("no trial was ended early. Give those that have finished more to do, such as args.epochs=20")
    if not settings:
        groups = [left for group in groups if (left := _without_successors(group, study.trials))]
    chosen = [trial for group in groups[:top] for trial in group]
    waiting = _without_successors(chosen, study.trials, settings=settings)
    if not waiting:
        what = f"been given {' '.join(settings)}" if settings else "been queued again"
        raise UserError(f"the best trials of sweep {sweep.run_id} have {what} before")
    for trial in waiting:
        job = resolve(spec, point_of(spec.sweep.parameters, trial.params))
        continued(sweep, job, {FROM: trial.number, SETTINGS: _settings_of(trial, settings)})
    return _enqueue(sweep, spec, waiting, origin="extend", settings=settings)


def continue_stopped(sweep: SweepDir, spec: SweepSpec) -> list[Again]:
    """Let the trials go on that were ended because the sweep might cost no more."""
    waiting = stopped_by_budget(Study(sweep).read().trials)
    return _enqueue(sweep, spec, waiting, origin="budget", settings=()) if waiting else []


def stopped_by_budget(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Those that were ended because the sweep might cost no more, and have not gone on since."""
    stopped = [trial for trial in trials if trial.state == "pruned" and trial.user_attrs.get(ERROR_CLASS) == BUDGET]
    return _without_successors(stopped, trials)


def continued(sweep: SweepDir, job: JobSpec, marks: Mapping[str, object]) -> JobSpec:
    """The spec of a trial whose ``marks`` (its user attributes in the journal) say that it goes on from another one.

    Raises:
        SpecError: its settings do not fit the spec.
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
            raise SpecError(f"{text}: {name} is a parameter of the sweep, of which each trial has its own value")


def _with_something_left(points: Sequence[Point], settings: Sequence[str]) -> list[list[TrialRecord]]:
    """The trials of each point, all its seeds, that can go on; of points of which some can, the best one first."""
    if not settings:
        return [point.ended_early for point in points if point.ended_early]
    groups = ([*point.trials, *point.ended_early] if point.complete else point.ended_early for point in points)
    return [group for group in groups if not _have(group[0], settings)]


def _have(trial: TrialRecord, settings: Sequence[str]) -> bool:
    """Whether it was a command's that gave it just this to do."""
    return _settings_of(trial, ())[-len(settings) :] == list(settings)


def _settings_of(trial: TrialRecord, more: Sequence[str]) -> list[str]:
    return [*trial.user_attrs.get(SETTINGS, []), *more]


def _without_successors(
    trials: Sequence[TrialRecord], everything: Sequence[TrialRecord], *, settings: Sequence[str] = ()
) -> list[TrialRecord]:
    """Those that none goes on from yet, with just these ``settings`` where there are some."""
    followers = [trial for trial in everything if FROM in trial.user_attrs]
    followed = {trial.user_attrs[FROM] for trial in followers if not settings or _have(trial, settings)}
    return [trial for trial in trials if trial.number not in followed]


def _enqueue(
    sweep: SweepDir, spec: SweepSpec, trials: Sequence[TrialRecord], *, origin: str, settings: Sequence[str]
) -> list[Again]:
    from hpcaccel.sweeps.study import SweepStudy

    study = SweepStudy.of(sweep, spec)
    found = []
    for trial in trials:
        found.append(queue_again(sweep, study, trial, origin=origin, settings=settings))
    return found


def queue_again(
    sweep: SweepDir, study: SweepStudy, trial: TrialRecord, *, origin: str, settings: Sequence[str] = ()
) -> Again:
    """Let one trial go on as another one, with what it had of its own; its checkpoint is pinned until that has ended.

    Raises:
        RunDirectoryError: the checkpoint cannot be pinned.
    """
    checkpoint = hold(sweep, trial)
    marks: dict[str, object] = {FROM: trial.number, SETTINGS: _settings_of(trial, settings)}
    if checkpoint is not None:
        marks[CHECKPOINT] = str(checkpoint.relative_to(sweep.path))
    study.enqueue(trial.number, origin="extend" if is_extended(trial.user_attrs) else origin, marks=marks)
    step = None if checkpoint is None else int(checkpoint.name.rpartition("_")[2])
    return Again(trial=trial.number, checkpoint_step=step)
