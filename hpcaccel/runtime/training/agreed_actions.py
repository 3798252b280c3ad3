"""``AgreedActions``: when the ranks agree on saves and stops, and what follows."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from hpcaccel.runtime.training.stop_agreement import BUSY, FAILED, MOST_STEPS, StopDecision

if TYPE_CHECKING:
    from hpcaccel.runtime.training.agreed_stop import AgreedStop
    from hpcaccel.runtime.training.loop_context import LoopContext
    from hpcaccel.runtime.training.save_schedule import SaveSchedule
    from hpcaccel.runtime.training.training_end import TrainingEnd

__all__ = ["AgreedActions", "AgreementPace"]

AGREE_SECONDS = 0.2
"""Short steps agree about so often."""
FIRST_SECONDS = 5.0
"""For so long the ranks agree at every step, until the time of a step is known."""


class AgreementPace:
    """Proposes on rank 0 after how many steps to agree again. An agreement takes some 0.05 to 0.4 ms, most of it
    to wake a thread of gloo."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._last_read = 0.0
        self._steps = 0
        self._step_seconds = AGREE_SECONDS

    def step_is_over(self) -> None:
        self._steps += 1

    def was_read(self) -> None:
        """Record that the result of an agreement was read."""
        now = monotonic()
        if self._begun is None:
            self._begun = now
        elif self._steps:
            self._step_seconds = (now - self._last_read) / self._steps
        self._last_read, self._steps = now, 0

    def propose(self, most: float) -> int:
        """The number of steps, at most ``most``: an action is due then."""
        if self._begun is None or monotonic() - self._begun < FIRST_SECONDS:
            return 1
        return max(1, int(min(MOST_STEPS, most, AGREE_SECONDS / max(self._step_seconds, 1e-9))))


class AgreedActions:
    """Agrees with the other ranks at each step, or at some of them if they are short, and carries out the agreement:
    saves and stops."""

    def __init__(self, context: LoopContext, stop: AgreedStop, saves: SaveSchedule, end: TrainingEnd) -> None:
        self._counters = context.counters
        self._flag = context.flag
        self._in_use = context.in_use
        self._own_time = context.own_time
        self._checkpoints = context.checkpoints
        self._group = context.group
        self._saves = saves
        self._snapshots = saves.snapshots
        self._end = end
        self._profiler, self._requests = stop.profiler, stop.save_requests
        self._agreement = stop.agreement
        self._pace = AgreementPace()
        self._until_issue = 0
        """Number of further steps until the next agreement is issued; 0 if one is pending."""

    def begin(self) -> None:
        """Issue the first agreement of a loop, unless one is pending."""
        if not self._agreement.pending:
            self._issue()

    def at_step(self, step: int) -> None:
        """Called when ``step`` is over. Carry out the agreement that was issued at the previous step, if one was, and
        issue the next one if it is to be read at the next step.

        Raises:
            SystemExit: the ranks have agreed on a stop after which the training is to be continued.
            CheckpointError: a save failed.
        """
        if self._profiler is not None and self._profiler.is_active:
            self._profiler.at_step(step)
        agreement, own_time = self._agreement, self._own_time
        if agreement.is_quiet:
            saves, following = self._saves, step + 1
            if not (
                self._flag.raised
                or following >= saves.due_step
                or following >= self._snapshots.due_step
                or monotonic() >= saves.due_time
                or (self._requests is not None and self._requests.names and saves.is_requested)
            ):
                return
        self._pace.step_is_over()
        if self._until_issue:
            self._until_issue -= 1
            if not self._until_issue:
                self._issue()
            if own_time is not None:
                own_time.step_is_over()
            return
        decision = agreement.read()
        if decision is not None:
            self._pace.was_read()
            if decision.uneven:
                self._in_use.warn_of_uneven_passes(self._group)
            if decision.stop or decision.save or decision.snapshot or self._checkpoints.in_flight:
                self._act(decision)
        if own_time is not None and agreement.times:
            own_time.record_all(step, agreement.times)
            agreement.times = []
        if decision is None or decision.steps == 1:
            self._issue()
        else:
            self._until_issue = decision.steps - 1
        if own_time is not None:
            own_time.step_is_over()

    def at_once(self) -> None:
        """Agree now, wait for the result, and carry it out. Collective."""
        before = self._agreement.read() or StopDecision()
        self._issue()
        now = self._agreement.read() or StopDecision()
        if before.stop or now.stop or before.save or now.save or self._checkpoints.in_flight:
            self._act(now._replace(stop=before.stop or now.stop, save=before.save or now.save))
        self._issue()

    def until_all_have_left(self) -> None:
        """Issue and read agreements as an inactive rank, after this rank has left its loop, until all have left."""
        inactive = False
        while True:
            decision = self._agreement.read()
            if decision is not None:
                self._act(decision)
                if inactive and not decision.active:
                    return
            self._issue(active=False)
            inactive = True

    def _steps_until_next(self) -> int:
        """Rank 0's proposal of when to read the agreement after the one that is issued now: at the latest at the step
        of the next save or snapshot."""
        return self._pace.propose(min(self._saves.due_step, self._snapshots.due_step) - (self._counters.step + 1))

    def _issue(self, *, active: bool = True) -> None:
        self._until_issue = 0
        if self._flag.raised:
            self._checkpoints.hurry()  # the save of the stop will wait for the one in flight
        own_time = self._own_time
        self._agreement.issue(
            stop=self._flag.raised,
            save=active and self._saves.is_due(self._counters.step + 1),
            active=active,
            passes=self._in_use.passes,
            own=own_time.take() if own_time is not None and self._agreement.gathers else None,
            saving=self._saves.background_progress,
            snapshot=active and self._counters.step + 1 >= self._snapshots.due_step,
            steps=self._steps_until_next() if active else 1,
        )
        if self._checkpoints.in_flight:
            self._agreement.is_quiet = False  # look at each step whether it has ended

    def _act(self, decision: StopDecision) -> None:
        if self._checkpoints.in_flight and decision.saving != BUSY:
            self._saves.finish_background(failed=decision.saving == FAILED)
        if decision.stop:
            self._checkpoints.hurry()
            self._end.stop()
        if decision.snapshot:
            self._snapshots.take()
        if decision.save:
            self._saves.due()
