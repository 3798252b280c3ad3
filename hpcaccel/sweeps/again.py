"""Trials once more: those that failed, and the best ones with more to do.

A trial that has ended is final in Optuna. What goes on from it is a trial of its own, with the same point and seed,
which waits in the journal for the next worker; it starts from the newest checkpoint that the old one has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcaccel import layout
from hpcaccel.errors import SpecError, UserError
from hpcaccel.rundir import SweepDir
from hpcaccel.spec import JobSpec, SweepSpec, resolve, spec_from_values
from hpcaccel.spec.expand import escape
from hpcaccel.spec.overrides import setting_path
from hpcaccel.spec.points import point_of
from hpcaccel.spec.trials import layer_of
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.marks import FROM, SETTINGS
from hpcaccel.sweeps.overview import Study
from hpcaccel.sweeps.reading import TrialRecord
from hpcaccel.sweeps.results import ranking

__all__ = ["Again", "continued", "extend", "retry_failed"]


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
    chosen = [point.trial for point in points if settings or not point.complete][:top]
    if not chosen and points:
        raise UserError("no trial was ended early. Give those that have finished more to do, such as args.epochs=20")
    if not chosen:
        raise UserError(f"no trial of sweep {sweep.run_id} has a value yet")
    for trial in chosen:
        job = resolve(spec, point_of(spec.sweep.parameters, trial.params))
        continued(sweep, job, {FROM: trial.number, SETTINGS: list(settings)})
    return _enqueue(sweep, spec, chosen, origin="extend", settings=settings)


def continued(sweep: SweepDir, job: JobSpec, marks: Mapping[str, object]) -> JobSpec:
    """The spec of a trial whose ``marks`` (its user attributes in the journal) say that it goes on from another one.

    Raises:
        SpecError: its settings do not fit the spec.
    """
    if FROM not in marks:
        return job
    values = escape(job.model_dump(mode="json"))
    assert isinstance(values, Mapping)
    settings, number = marks.get(SETTINGS, []), marks[FROM]
    assert isinstance(settings, list)
    assert isinstance(number, int)
    result = spec_from_values(values, base=sweep.path, overrides=settings)
    checkpoint = layout.newest(sweep.trial(number).checkpoints)
    if checkpoint is None:
        return result
    resume = result.checkpoint.model_copy(update={"resume": str(checkpoint.path)})
    return result.model_copy(update={"checkpoint": resume})


def _refuse_parameter(spec: SweepSpec, text: str) -> None:
    layer = layer_of(spec.job)
    path = setting_path(text.partition("=")[0], layer)
    for name in spec.sweep.parameters:
        if setting_path(name, layer) == path:
            raise SpecError(f"{text}: {name} is a parameter of the sweep, of which each trial has its own value")


def _without_successors(trials: Sequence[TrialRecord], everything: Sequence[TrialRecord]) -> list[TrialRecord]:
    followed = {trial.user_attrs.get(FROM) for trial in everything}
    return [trial for trial in trials if trial.number not in followed]


def _enqueue(
    sweep: SweepDir, spec: SweepSpec, trials: Sequence[TrialRecord], *, origin: str, settings: Sequence[str]
) -> list[Again]:
    from hpcaccel.sweeps.study import SweepStudy

    study = SweepStudy.of(sweep, spec)
    found = []
    for trial in trials:
        study.enqueue(trial.number, origin=origin, marks={FROM: trial.number, SETTINGS: list(settings)})
        checkpoint = layout.newest(sweep.trial(trial.number).checkpoints)
        found.append(Again(trial=trial.number, checkpoint_step=None if checkpoint is None else checkpoint.step))
    return found
