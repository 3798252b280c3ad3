"""The study of a sweep in Optuna: draws trials, reports metrics at rungs, records results.

Any number of processes may use one storage at the same time, each with its own ``SweepStudy``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.pruners import NopPruner
from optuna.storages import BaseStorage, JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import UserError
from hpcaccel.spec.job.job_spec import JobSpec
from hpcaccel.spec.sweep.points import equal, resolve, seed_of
from hpcaccel.spec.sweep.sweep_fields import SweepSpec
from hpcaccel.sweeps.journal import Journal
from hpcaccel.sweeps.journal_notes import ORIGIN, POINT, REPEAT, SURPLUS, is_drawn, point_number, repeat_number
from hpcaccel.sweeps.pruning import Curve, rule_of
from hpcaccel.sweeps.sampler import SpaceExhausted, TrialSampler, rank
from hpcaccel.sweeps.space import Point

__all__ = ["STUDY_NAME", "AskedTrial", "NoMore", "SweepStudy"]

STUDY_NAME = "sweep"
_DIRECTIONS = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}


@dataclass(frozen=True, kw_only=True)
class AskedTrial:
    """A trial to run."""

    number: int
    point: Point
    repeat: int = 0
    """Index among the trials of its point, from 0."""
    seed: int | None = None
    """``runtime.seed`` of the trial; None if the trial uses the spec's seed."""

    def job(self, spec: SweepSpec) -> JobSpec:
        """The trial's job spec. Raises SpecError if the values are not valid together."""
        return resolve(spec, self.point, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class NoMore:
    """There are no more trials to start; ``why`` is a message."""

    why: str


class SweepStudy:
    """The study of a sweep in Optuna. The constructor creates the study if it does not exist.

    Args:
        storage: Optuna's storage for the study, such as ``optuna.storages.JournalStorage(Journal(path))``.

    Raises:
        UserError: a package is missing, or the existing study has other modes (``min``, ``max``).
    """

    def __init__(self, spec: SweepSpec, storage: BaseStorage) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # Optuna warns about its fallbacks at each trial
        self.spec = spec
        self.rule = rule_of(spec.sweep)
        self.drawing = TrialSampler(spec)
        self._reported: dict[int, int] = {}
        """The last reported step of each trial of this process."""
        self._ended: dict[int, Curve] = {}
        directions = [_DIRECTIONS[mode] for mode in spec.sweep.modes]
        self.study = optuna.create_study(
            storage=storage,
            study_name=STUDY_NAME,
            sampler=self.drawing,
            pruner=NopPruner(),
            directions=directions,
            load_if_exists=True,
        )
        if self.study.directions != directions:
            raise UserError(
                f"this sweep was started with the modes ({_modes(self.study.directions)}), not "
                f"({_modes(directions)}): start a new sweep to change metrics or modes"
            )

    @classmethod
    def of(cls, sweep: SweepDir, spec: SweepSpec) -> SweepStudy:
        """The study in a sweep's directory; raises the same errors as the constructor."""
        return cls(spec, JournalStorage(Journal(sweep.journal)))

    # -- new trials -----------------------------------------------------------------------------------------------

    def ask(self) -> AskedTrial | NoMore:
        """The next trial: a waiting one if there is any (sampled in advance, a retry, or another seed of a point), else
        a trial at a new point."""
        while True:
            trials = self.trials()
            if not any(trial.state == TrialState.WAITING for trial in trials) and (why := self._ends(trials)):
                return NoMore(why=why)
            trial = self.study.ask()
            if why := self._surplus(trial):
                self._give_back(trial, why)
                return NoMore(why=why)
            try:
                point = self.drawing.space.suggest(trial)
            except SpaceExhausted:
                self._give_back(trial, self._used_up())
                continue
            if self._is_double(trial, point):
                self._give_back(trial, "another worker has drawn the same point")
                continue
            return self._asked(trial, point)

    def again(self, number: int) -> AskedTrial:
        """A trial that has begun in any process, with its point; parameters not yet stored are drawn again."""
        trial = Trial(self.study, self._trial_id(number))
        return self._asked(trial, self.drawing.space.suggest(trial))

    def put_back(self, number: int) -> None:
        """Set a trial's state back to waiting. It keeps its point, and ``ask`` returns it to any process."""
        self.study._storage.set_trial_state_values(self._trial_id(number), TrialState.WAITING)

    def enqueue(self, number: int, *, origin: str, marks: Mapping[str, object] | None = None) -> None:
        """Enqueue a new trial with the point and the seed of an existing one, to run next.

        Args:
            origin: why the new trial is created: ``retry``, ``extend`` or ``budget``.
            marks: further user attributes of the new trial.
        """
        old = self.trials()[number]
        self._enqueue(old, repeat_number(old.user_attrs), origin, marks or {})

    def _enqueue(self, old: FrozenTrial, repeat: int, origin: str, more: Mapping[str, object]) -> None:
        marks = {POINT: point_number(old.number, old.user_attrs), REPEAT: repeat, ORIGIN: origin}
        self.study.enqueue_trial(dict(old.params), user_attrs={**marks, **more})

    def _asked(self, trial: Trial, point: Point) -> AskedTrial:
        if is_drawn(trial.user_attrs):
            self._complete_point(trial.number)
        repeat = repeat_number(trial.user_attrs)
        return AskedTrial(number=trial.number, point=point, repeat=repeat, seed=seed_of(self.spec, repeat))

    def _complete_point(self, number: int) -> None:
        """Enqueue the trials that run trial ``number``'s point with further seeds, except those that exist already."""
        if self.spec.sweep.repeat == 1:
            return
        trials = self.trials()
        there = {
            repeat_number(trial.user_attrs)
            for trial in trials
            if trial.user_attrs.get(ORIGIN) == "repeat" and trial.user_attrs.get(POINT) == number
        }
        for repeat in range(1, self.spec.sweep.repeat):
            if repeat not in there:
                self._enqueue(trials[number], repeat, "repeat", {})

    def _points_allowed(self) -> int | None:
        most = self.spec.sweep.max_trials
        return None if most is None else most // self.spec.sweep.repeat

    def _ends(self, trials: Sequence[FrozenTrial]) -> str:
        """Why no further point may be drawn; empty if one may be drawn."""
        drawn = sum(is_drawn(trial.user_attrs) for trial in trials)
        allowed, count = self._points_allowed(), self.drawing.space.count
        if allowed is not None and drawn >= allowed:
            return f"all trials that max_trials ({self.spec.sweep.max_trials}) allows have been started"
        bounded = self.spec.sweep.method == "grid" or self.drawing.listed
        return self._used_up() if bounded and count is not None and drawn >= count else ""

    def _surplus(self, trial: Trial) -> str:
        """Why a new trial must be discarded; empty if it may run. A drawn trial may exceed ``max_trials`` because other
        workers drew at the same time."""
        if not is_drawn(trial.user_attrs):
            return ""
        allowed = self._points_allowed()
        if allowed is None or rank(self.trials(), trial.number) < allowed:
            return ""
        return f"all trials that max_trials ({self.spec.sweep.max_trials}) allows have been started"

    def _used_up(self) -> str:
        return f"all {self.drawing.space.count} points of the search space have been tried"

    def _is_double(self, trial: Trial, point: Point) -> bool:
        """Whether, in a small space, another trial has the same point because two workers drew at the same time.

        The worker that stores its point later reads the other's point. If each reads the other's, both draw again.
        """
        if not (self.drawing.listed and is_drawn(trial.user_attrs)):
            return False
        space = self.drawing.space
        return any(
            other.number != trial.number and is_drawn(other.user_attrs) and equal(space.point(other.params), point)
            for other in self.trials()
        )

    def _give_back(self, trial: Trial, why: str) -> None:
        trial.set_user_attr(SURPLUS, why)
        self.study.tell(trial, state=TrialState.FAIL)

    # -- running and ended trials ---------------------------------------------------------------------------------

    def wants(self, number: int, step: int) -> bool:
        """Whether to report the metric at ``step``, because the trial has reached a rung."""
        if self.rule is None or step < 1:
            return False
        if number not in self._reported:
            self._reported[number] = self.trials()[number].last_step or 0
        return self.rule.wants(number, step, after=self._reported[number])

    def report(self, number: int, step: int, value: float) -> str:
        """Report a trial's metric at a rung. Returns why the trial is pruned, or an empty string if it continues."""
        Trial(self.study, self._trial_id(number)).report(value, step)
        self._reported[number] = max(step, self._reported.get(number, 0))
        return self.verdict(number)

    def verdict(self, number: int) -> str:
        """Why a trial is pruned, based on its reported values; empty if it continues."""
        if self.rule is None:
            return ""
        trials = self.trials()
        others = [self._curve(trial) for trial in trials if trial.number != number and trial.intermediate_values]
        return self.rule.verdict(_curve(trials[number]), others)

    def _curve(self, trial: FrozenTrial) -> Curve:
        """The curve of a trial; those of ended trials are cached, because there may be thousands."""
        if not trial.state.is_finished():
            return _curve(trial)
        if trial.number not in self._ended:
            self._ended[trial.number] = _curve(trial)
        return self._ended[trial.number]

    def mark(self, number: int, attributes: Mapping[str, object]) -> None:
        """Set user attributes of an unfinished trial."""
        for name, value in attributes.items():
            self.study._storage.set_trial_user_attr(self._trial_id(number), name, value)

    def complete(self, number: int, values: Sequence[float]) -> None:
        """Record a trial as complete.

        Args:
            values: the last value of each metric, in the sweep's order; not NaN.
        """
        assert not any(math.isnan(value) for value in values)
        self.study.tell(number, list(values), state=TrialState.COMPLETE, skip_if_finished=True)

    def prune(self, number: int, *, last: tuple[int, float] | None = None) -> None:
        """Record a trial as pruned.

        Args:
            last: the trial's last step and value, recorded if no value was reported and there is a single metric.
        """
        trial = self.trials()[number]
        if last is not None and trial.last_step is None and len(self.study.directions) == 1:
            self.study._storage.set_trial_intermediate_value(trial._trial_id, *last)
        self.study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)

    def fail(self, number: int) -> None:
        """Record a trial as failed."""
        self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def trials(self) -> list[FrozenTrial]:
        """All trials so far, ordered by number. These are Optuna's own objects: do not modify them."""
        return self.study.get_trials(deepcopy=False)

    def _trial_id(self, number: int) -> int:
        return self.trials()[number]._trial_id


def _modes(directions: Sequence[StudyDirection]) -> str:
    return ", ".join(mode for one in directions for mode, direction in _DIRECTIONS.items() if one == direction)


def _curve(trial: FrozenTrial) -> Curve:
    complete = trial.state == TrialState.COMPLETE
    return Curve(number=trial.number, values=trial.intermediate_values, complete=complete)
