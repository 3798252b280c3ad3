"""``Loop``: one process's training loop, with ``resume``, ``epochs``, ``steps``, ``checkpoint`` and ``should_stop``.

Protocol
--------

All ranks save and stop at the same optimizer step, on which they agree while training continues:

1. *A step is over.* ``StepBoundary`` counts steps and determines which call ends a step: the next batch of a prepared
   loader, ``checkpoint()``, the next item of ``epochs()`` or ``steps()``, or the next backward pass. That call runs
   ``Loop.step_is_over``.
2. *The ranks agree* (``AgreedStop``), at each step or, if steps are short, at some of them
   (``AgreementPace``). At step k each rank issues an asynchronous all-reduce. Its main values say
   whether the rank must stop (a signal has set its ``StopFlag``), whether a save is due (``SaveSchedule.is_due``),
   whether the rank is still in its loop, and how far its background save is. At step k + 1 all ranks read the same
   result (``StopAgreement.read``). A single process uses its own values, and skips both calls if no action is due.
3. *All ranks act on the result* (``AgreedActions``): finish the background save, stop, or save. ``SaveSchedule`` saves;
   ``TrainingEnd`` carries out a stop: either it saves (if there is time) and raises SystemExit, or ``finishing``
   becomes True, and ``epochs()``, ``steps()`` and the training's loader end early.
4. *Leaving a loop.* Ranks may leave their loops at different steps. A rank that has left continues to issue and read,
   as inactive, until all ranks have left (``AgreedActions.until_all_have_left``); then all save the result.

``Resumption`` loads a checkpoint at the start: in ``resume()``, which ``epochs()`` and ``steps()`` call, or in
``load_state()``. It restores the random generators when the checkpoint is loaded, and again when the loop starts or, in
the middle of an epoch, when the loader continues, because code run in between may draw from them.

If a script calls none of ``resume``, ``epochs``, ``steps`` and ``checkpoint``, its training is saved when a stop is
requested, but not by schedule, and resumes only through ``load_state()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.call_site import call_site
from hpcaccel.runtime.training.accumulation import Accumulation, samples_per_step
from hpcaccel.runtime.training.agreed_actions import AgreedActions
from hpcaccel.runtime.training.agreed_stop import AgreedStop
from hpcaccel.runtime.training.loop_context import LoopContext
from hpcaccel.runtime.training.resumption import ResumedCounters, Resumption
from hpcaccel.runtime.training.save_schedule import SaveSchedule
from hpcaccel.runtime.training.step_boundary import StepBoundary
from hpcaccel.runtime.training.training_end import TrainingEnd, refuse_second_training

__all__ = ["Loop"]


class Loop:
    """The loop of this process. All ranks call its methods in the same order; see the protocol in the module docstring.

    Args:
        accumulation: gradient accumulation of the most recently created Accelerator.
    """

    def __init__(self, context: LoopContext, accumulation: Accumulation) -> None:
        self.finishing = False
        """Whether the training is ending for good before its last step."""
        self.accumulation = accumulation
        self.context = context
        self.boundary = StepBoundary(context)
        stop = AgreedStop(context.place, context.group, flag=context.flag, clock=context.clock, at_end=self.end)
        self.saves = SaveSchedule(context, stop)
        self._resumption = Resumption(context)
        self._end = TrainingEnd(context, stop, self.saves, on_finish=self._finish)
        self._agreed = AgreedActions(context, stop, self.saves, self._end)
        self._counters, self._clock, self._status = context.counters, context.clock, context.status
        self._own_time, self._exactness = context.own_time, context.exactness
        self._flag, self.optimizers = context.flag, context.prepared.optimizers
        self._is_running = False
        """Whether a step is over since this object was created, and since the last loop ended."""

    @property
    def step(self) -> int:
        """Number of completed optimizer steps, including those before a resume."""
        return self._counters.step

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._counters.epoch

    # -- the five methods that scripts call ---------------------------------------------------------------------------

    def resume(self) -> ResumedCounters:
        """Load the newest checkpoint, if there is one, into all prepared objects. Later calls return the same value.

        Raises:
            RuntimeMisuse: nothing has been prepared, or this program has already completed a training with this
                checkpoint directory.
            CheckpointError: the checkpoint could not be loaded.
            SystemExit: a stop was requested while the program was starting, and the run is to be continued later.
        """
        self._manage()
        if self._resumption.resumed is not None:
            return self._resumption.resumed
        prepared = self.context.prepared
        if not (prepared.models or prepared.optimizers or prepared.registered):
            raise RuntimeMisuse("resume() was called before prepare(): nothing has been prepared. Call prepare() first")
        self._clock.prepared()
        newest = self.context.checkpoints.find()
        self._end.stop_before_start(newest)
        return self.load(newest, or_newer=True)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, up to ``count - 1``, starting with the interrupted epoch."""
        length = self.accumulation.steps_per_epoch(self.context.prepared.loaders)
        self._enter(None if length is None else count * length)
        while self.epoch < count and not self.finishing:
            try:
                yield self.epoch
            except GeneratorExit:
                self.loop_is_left()
                raise
            self.step_is_over()
            if not self.finishing:
                self._counters.epoch += 1
                self._agree_at_once()  # a checkpoint saved from here on continues with the next epoch
        self._exit()

    def steps(self, count: int) -> Iterator[int]:
        """Before each step, yield the number of completed steps, up to ``count - 1``. Stop early if the training is
        ending for good."""
        self._enter(count)
        while self.step < count and not self.finishing:
            try:
                yield self.step
            except GeneratorExit:
                self.loop_is_left()
                raise
            self.step_is_over()
        self._exit()

    def checkpoint(self) -> None:
        """Save if a save is due; save and exit if the run must stop and continue later. Called once per step.

        Between accumulation boundaries of a prepared optimizer nothing is saved.

        Raises:
            SystemExit: on all ranks at the same step, if the run must stop and continue later. The exit code is 85, or
                143 if there is no checkpoint directory.
            CheckpointError: the checkpoint could not be saved.
            RuntimeMisuse: the run has a checkpoint that the script has not loaded, or this program has already
                completed a training with this checkpoint directory.
        """
        boundary = self.boundary
        if not boundary.script_reports:
            self._manage()
            boundary.script_reports = True
        if not self.optimizers:
            boundary.count_step(is_prepared=False)
        self.step_is_over()

    def should_stop(self) -> bool:
        """Whether the training is ending for good; ``epochs`` and ``steps`` then end, too."""
        return self.finishing

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_is_over(self) -> None:
        """If a step has ended since the last call, carry out the agreed save or stop, and issue the next agreement."""
        step, boundary = self._counters.step, self.boundary
        if step == boundary.reported_step or boundary.holds:
            if self._flag.raised:
                self._log_delayed_stop()
            return
        boundary.reported_step = step
        if boundary.stepped:
            boundary.stepped.clear()
        self._clock.step_is_over(step)
        if not self._is_running:
            self._is_running = True
            if not boundary.has_begun:
                self._begin()
            elif self._status.phase == "finishing":  # the script's own loop after ``epochs`` or ``steps``
                self._status.train(step)
        self._agreed.at_step(step)

    def backward_begins(self) -> None:
        """Called when a backward pass starts. Ends the last step if no other call ends it (see ``StepBoundary``).

        A save at this point contains the state after the last step, except that the forward pass may have drawn from
        the global random generators.
        """
        own_time, boundary = self._own_time, self.boundary
        if own_time is not None:
            own_time.backward_begins()
        if self._counters.step != boundary.reported_step and boundary.is_over_at_backward():
            self._exactness.in_backward = True
            self.step_is_over()
            self._exactness.in_backward = False
            if own_time is not None:
                own_time.discard()
        self._exactness.has_gradients = True

    @contextmanager
    def saves_and_stops_deferred(self) -> Iterator[None]:
        """Context that defers saves and stops, for blocks in which ranks do different numbers of steps.

        They are deferred to the end of the epoch in a loop over ``epochs()``, to the next step with ``steps()`` or
        ``checkpoint()``, else to the end of the context. All ranks must enter and leave the context.
        """
        with self.boundary.held():
            yield
        if not self.saves.is_managed:
            self._agree_at_once()

    # -- hooks of prepared loaders, and state for the heartbeat -------------------------------------------------------

    @property
    def finished_epochs_are_over(self) -> bool:
        """Whether a resume starts the next epoch if the last step of an epoch was saved. Scripts that use this loop's
        methods, or that may restore the epoch number from a registered object, enter the complete epoch again instead,
        and find no batches left."""
        restores_epoch = self.context.prepared.registered and not self._resumption.was_saved_by_script
        return not (self.saves.is_managed or restores_epoch)

    def loop_is_entered(self) -> None:
        """Called when the script starts another iteration over a loader that is trained on."""
        self._status.left_at = None

    def loop_is_left(self) -> None:
        """Called when the script leaves its loop early; other ranks may wait for this one."""
        self._status.left_at = call_site()
        self.boundary.has_left = True

    def restore_rng(self) -> None:
        """Set the random generators to their state in the checkpoint; see ``Resumption.restore_rng``."""
        self._resumption.restore_rng()

    @property
    def evaluates(self) -> bool:
        """Whether the script has done a step and is now iterating over a loader that is not trained on."""
        source = self.context.in_use.current
        return source is not None and not source.trains and self.boundary.has_begun

    # -- loading, ending ----------------------------------------------------------------------------------------------

    def load(self, path: Path | None, *, or_newer: bool = False, **options: Any) -> ResumedCounters:
        """Restore ``path`` into all prepared objects; see ``Resumption.restore``."""
        self._clock.prepared()
        with self._status.during("loading"):
            resumed = self._resumption.restore(path, or_newer=or_newer, **options)
        self.boundary.begin_at(resumed.step)
        self.saves.begin_at(self._resumption.committed_step, state_step=resumed.step)
        return resumed

    def end(self) -> None:
        """Complete the training at its end or at the end of the program; see ``TrainingEnd.complete``."""
        self._end.complete()

    def abandon(self) -> None:
        """Drop the training on this rank only; no checkpoint is saved and no outcome is written."""
        self._end.abandon()

    # -- entering and leaving a loop ----------------------------------------------------------------------------------

    def _manage(self) -> None:
        """Save by schedule from now on: the script has called ``resume``, ``epochs``, ``steps`` or ``checkpoint``."""
        if not self.saves.is_managed:
            refuse_second_training(self.context.checkpoints.directory)
            self.saves.manage()
            if self.boundary.has_begun:
                self.saves.warn_if_no_directory()

    def _enter(self, total_steps: int | None) -> None:
        self._resumption.write_progress(self.resume(), total_steps)
        if not self._resumption.in_mid_epoch:
            self.restore_rng()  # otherwise the loader does, when it continues its epoch
        self._exactness.begin()
        self._agreed.begin()
        self._status.train(self.step)

    def _exit(self) -> None:
        """Wait until the loop has ended on all ranks, then save the result."""
        self._agreed.until_all_have_left()
        self._end.keep_result("end of the loop")
        self._status.phase, self._status.left_at = "finishing", None
        self._is_running = False

    def _finish(self) -> None:
        self.finishing = True

    def _agree_at_once(self) -> None:
        """Agree on saves and stops for the steps inside ``saves_and_stops_deferred``, which issued no agreements."""
        if self.boundary.has_unagreed_steps:
            self.boundary.has_unagreed_steps = False
            if not self.boundary.has_begun:
                self._begin()
            self._agreed.at_once()

    def _begin(self) -> None:
        """Called when the first step of this process is over."""
        self.boundary.has_begun = True
        self._exactness.begin()
        if self._status.phase != "training":
            self._status.train(self.step)
        self._resumption.check_that_loaded(is_managed=self.saves.is_managed)
        self.saves.warn_if_no_directory()
        samples = samples_per_step(self.accumulation, self.context.group)
        if samples is not None:
            self.context.log_once(samples)

    def _log_delayed_stop(self) -> None:
        """If an evaluation is running, log that it delays the stop: rank 0 may be evaluating alone."""
        if self.evaluates:
            self.context.log_once(
                "a stop was requested during an evaluation: the training stops at the next training step. If the ranks "
                f"are killed before that, it resumes from {self.saves.newest or 'the start'}"
            )
