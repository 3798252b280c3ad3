"""A sweep's trials in Optuna: asking for the next one, reporting at rungs, telling how it ended.

Any number of processes do so on one storage at once, each with a ``SweepStudy`` of its own.
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

from hpcaccel.core.run_dir import SweepDir
from hpcaccel.errors import UserError
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.points import equal
from hpcaccel.spec.sweep_fields import SweepSpec
from hpcaccel.spec.trial_spec import resolve, seed_of
from hpcaccel.sweeps.journal import Journal
from hpcaccel.sweeps.pruning import Curve, rule_of
from hpcaccel.sweeps.sampler import Drawing, UsedUp, rank
from hpcaccel.sweeps.space import Point
from hpcaccel.sweeps.trial_attrs import ORIGIN, POINT, REPEAT, SURPLUS, is_drawn, point_number, repeat_number

__all__ = ["STUDY_NAME", "Asked", "NoMore", "SweepStudy"]

STUDY_NAME = "sweep"
_DIRECTIONS = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A trial to run."""

    number: int
    point: Point
    repeat: int = 0
    """Which of the point's trials it is, from 0."""
    seed: int | None = None
    """``runtime.seed`` of the trial; None: the spec's own."""

    def job(self, spec: SweepSpec) -> JobSpec:
        """Its job spec. Raises SpecError where the values do not go together."""
        return resolve(spec, self.point, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class NoMore:
    """There is no trial left to begin."""

    why: str
    """For people."""


class SweepStudy:
    """The study of a sweep, opened or made.

    Args:
        storage: such as ``optuna.storages.JournalStorage(Journal(path))``.

    Raises:
        UserError: a package is missing, or the study was made for other metrics.
    """

    def __init__(self, spec: SweepSpec, storage: BaseStorage) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of its own fallbacks at every trial
        self.spec = spec
        self.rule = rule_of(spec.sweep)
        self.drawing = Drawing(spec)
        self._looked_at: dict[int, int] = {}
        """The last step of a trial that is written down, for those that this process follows."""
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
                f"this sweep was started with other metrics or modes ({_modes(self.study.directions)}) than "
                f"{_modes(directions)}: start a new one for them"
            )

    @classmethod
    def of(cls, sweep: SweepDir, spec: SweepSpec) -> SweepStudy:
        """The study of a sweep's directory; raises as above."""
        return cls(spec, JournalStorage(Journal(sweep.journal)))

    # -- beginning ------------------------------------------------------------------------------------------------

    def ask(self) -> Asked | NoMore:
        """The next trial: one that waits (a further seed of a point, a retry), else a new point."""
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
            except UsedUp:
                self._give_back(trial, self._used_up())
                continue
            if self._is_double(trial, point):
                self._give_back(trial, "another worker has drawn the same point")
                continue
            return self._asked(trial, point)

    def again(self, number: int) -> Asked:
        """A trial that was begun before, whoever did: with the same point, however far that had been written."""
        trial = Trial(self.study, self._trial_id(number))
        return self._asked(trial, self.drawing.space.suggest(trial))

    def put_back(self, number: int) -> None:
        """Let a trial that was asked for wait, with its point, for whoever asks next."""
        self.study._storage.set_trial_state_values(self._trial_id(number), TrialState.WAITING)

    def enqueue(self, number: int, *, origin: str, marks: Mapping[str, object] | None = None) -> None:
        """Let the point and the seed of a trial run once more, next: as a trial of its own.

        Args:
            origin: why, ``retry`` or ``extend``.
            marks: what else the new trial's user attributes are to say.
        """
        old = self.trials()[number]
        self._enqueue(old, repeat_number(old.user_attrs), origin, marks or {})

    def _enqueue(self, old: FrozenTrial, repeat: int, origin: str, more: Mapping[str, object]) -> None:
        marks = {POINT: point_number(old.number, old.user_attrs), REPEAT: repeat, ORIGIN: origin}
        self.study.enqueue_trial(dict(old.params), user_attrs={**marks, **more})

    def _asked(self, trial: Trial, point: Point) -> Asked:
        if is_drawn(trial.user_attrs):
            self._complete_point(trial.number)
        repeat = repeat_number(trial.user_attrs)
        return Asked(number=trial.number, point=point, repeat=repeat, seed=seed_of(self.spec, repeat))

    def _complete_point(self, number: int) -> None:
        """Enqueue the further seeds of a point, those that are not there yet."""
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
        """Why no further point may be drawn; empty where one may."""
        drawn = sum(is_drawn(trial.user_attrs) for trial in trials)
        allowed, count = self._points_allowed(), self.drawing.space.count
        if allowed is not None and drawn >= allowed:
            return f"all {self.spec.sweep.max_trials} trials have begun"
        bounded = self.spec.sweep.method == "grid" or self.drawing.listed
        return self._used_up() if bounded and count is not None and drawn >= count else ""

    def _surplus(self, trial: Trial) -> str:
        """Why a trial that was just drawn is one too many: others were as quick."""
        if not is_drawn(trial.user_attrs):
            return ""
        allowed = self._points_allowed()
        if allowed is None or rank(self.trials(), trial.number) < allowed:
            return ""
        return f"all {self.spec.sweep.max_trials} trials have begun"

    def _used_up(self) -> str:
        return f"the space is used up: all its {self.drawing.space.count} points have been tried"

    def _is_double(self, trial: Trial, point: Point) -> bool:
        """Whether another trial has the same point of a small space: two workers have drawn in the same moment.

        One of them has written its point after the other, and sees it. Where both do, both draw once more.
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

    # -- running and ending ---------------------------------------------------------------------------------------

    def wants(self, number: int, step: int) -> bool:
        """Whether the metric at ``step`` is to be reported: the trial has come to a rung."""
        if self.rule is None or step < 1:
            return False
        if number not in self._looked_at:
            self._looked_at[number] = self.trials()[number].last_step or 0
        return self.rule.wants(number, step, after=self._looked_at[number])

    def report(self, number: int, step: int, value: float) -> str:
        """Write down a trial's metric at a rung; why the trial is to end, in words, empty where it goes on."""
        Trial(self.study, self._trial_id(number)).report(value, step)
        self._looked_at[number] = max(step, self._looked_at.get(number, 0))
        return self.verdict(number)

    def verdict(self, number: int) -> str:
        """Why a trial is to end, by what is written down of it; empty where it goes on. For who takes a trial over."""
        if self.rule is None:
            return ""
        trials = self.trials()
        others = [self._curve(trial) for trial in trials if trial.number != number and trial.intermediate_values]
        return self.rule.verdict(_curve(trials[number]), others)

    def _curve(self, trial: FrozenTrial) -> Curve:
        """The same one each time for a trial that has ended: with thousands of them this is what takes time."""
        if not trial.state.is_finished():
            return _curve(trial)
        if trial.number not in self._ended:
            self._ended[trial.number] = _curve(trial)
        return self._ended[trial.number]

    def mark(self, number: int, attributes: Mapping[str, object]) -> None:
        """Note something of a trial that has not been told yet."""
        for name, value in attributes.items():
            self.study._storage.set_trial_user_attr(self._trial_id(number), name, value)

    def complete(self, number: int, values: Sequence[float]) -> None:
        """The trial ran to its end.

        Args:
            values: the last of each metric, in the order of the sweep's; none of them may be NaN.
        """
        assert not any(math.isnan(value) for value in values)
        self.study.tell(number, list(values), state=TrialState.COMPLETE, skip_if_finished=True)

    def prune(self, number: int, *, last: tuple[int, float] | None = None) -> None:
        """The trial was ended early.

        Args:
            last: step and value that it had come to; counts where nothing has been reported.
        """
        trial = self.trials()[number]
        if last is not None and trial.last_step is None and len(self.study.directions) == 1:
            self.study._storage.set_trial_intermediate_value(trial._trial_id, *last)
        self.study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)

    def fail(self, number: int) -> None:
        """The trial failed and is not tried again."""
        self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def trials(self) -> list[FrozenTrial]:
        """All trials, by number, as they are now. They are not to be changed."""
        return self.study.get_trials(deepcopy=False)

    def _trial_id(self, number: int) -> int:
        return self.trials()[number]._trial_id


def _modes(directions: Sequence[StudyDirection]) -> str:
    return ", ".join(mode for one in directions for mode, direction in _DIRECTIONS.items() if one == direction)


def _curve(trial: FrozenTrial) -> Curve:
    complete = trial.state == TrialState.COMPLETE
    return Curve(number=trial.number, values=trial.intermediate_values, complete=complete)
