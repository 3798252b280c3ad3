"""``hpcaccel.stop_gate()``: agreed stops for a training loop without an Accelerator.

    gate = hpcaccel.stop_gate()
    for step, batch in enumerate(loader):
        ...
        if gate.step(step):
            save(path)
            gate.leave(checkpoint=path)

Protocol
--------

1. *Signals.* hpcaccel's launcher blocks SIGTERM and SIGUSR2 before it starts the program, and they stay blocked: each
   ``step`` tests whether one is pending. Data-loader workers inherit the mask, so they survive Slurm's SIGTERM, which
   goes to every process of the job step. With ``runtime.stop: signals``, and outside a run, handlers instead set a flag
   that ``step`` tests.
2. *Agreement.* ``step`` issues an asynchronous all-reduce of the ranks' flags on a gloo group of its own, and reads the
   result of the reduction that the previous ``step`` issued (``AgreedStop``, as in an Accelerator's loop). So no step
   waits, and ``step`` returns True on all ranks at the same step. Every rank must call ``step`` equally often. The
   gloo group is created by ``stop_gate`` if torch's default process group exists by then, else by the first ``step``.
   Without a default process group, each process stops by itself.
3. *Request.* Rank 0 reads from the run directory why to stop, what happens after the stop, and the deadline
   (``ProcessExit.request``).
4. *Leaving.* ``leave`` writes the outcome, waits for all ranks and exits with code 85. The outcome's checkpoint counts
   as the run's progress. A program that ends without ``leave`` gets the outcome ``completed``, unless a stop was
   requested after which the run is to continue.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.health.heartbeat import Activity, RankStatus, start_heartbeat
from hpcaccel.runtime.rank_logger import TRAINING_LOG, configure_training_log, torch_distributed
from hpcaccel.runtime.stop_flag import install_stop_flag
from hpcaccel.runtime.training.agreed_stop import AgreedStop
from hpcaccel.runtime.training.attempt_timing import AttemptClock
from hpcaccel.runtime.training.process_exit import LoneRank, join_default_group

if TYPE_CHECKING:
    from hpcaccel.core.rank_records import Outcome
    from hpcaccel.core.records import Reason
    from hpcaccel.core.stop_requests import StopRequest
    from hpcaccel.runtime.distributed.process_group import RankGroup
    from hpcaccel.runtime.health.stragglers import OwnTime
    from hpcaccel.runtime.training.stop_agreement import StopAgreement

__all__ = ["Phase", "StopGate", "has_accelerator", "stop_gate"]

logger = logging.getLogger(TRAINING_LOG)

Phase = Literal["loading", "training", "evaluating", "saving", "finishing"]

_gate: StopGate | None = None


def stop_gate() -> StopGate:
    """The stop gate of this process; later calls return the same gate until it is over. Call this on every rank, before
    the first step.

    Raises:
        RuntimeMisuse: this process has an Accelerator or a ``ResultsFile``, which stops by itself; or this is not the
            main thread, and the launcher has not blocked the signals.
        RankEnvironmentError: the gate's process groups cannot be formed.

    Example::

        gate = hpcaccel.stop_gate()
        for step in range(start, 1000):
            train_step()
            if gate.step(step + 1):
                gate.leave(checkpoint=save(step + 1))
    """
    global _gate
    if _gate is None or _gate.is_over:
        if has_accelerator():
            raise RuntimeMisuse(
                "stop_gate(): this process has an Accelerator, which already saves and stops at an agreed step. Loop "
                "over accelerator.epochs() or steps(), or call accelerator.checkpoint() after each step"
            )
        _gate = StopGate()
    elif type(_gate) is not StopGate:
        raise RuntimeMisuse("stop_gate(): this process has a ResultsFile, which stops the ranks itself. Use only one")
    return _gate


def has_accelerator() -> bool:
    """Whether this process has an Accelerator, which handles stop requests itself. Imports nothing."""
    session = sys.modules.get("hpcaccel.runtime.training_session")
    return session is not None and session.TrainingSession.existing() is not None


class StopGate:
    """Agrees with the other ranks on the step at which all of them stop. Created by ``stop_gate``."""

    own_time: OwnTime | None = None
    stack_counts = True

    def __init__(self) -> None:
        self.should_save = False
        """Whether the program is to save now and continue (``hpcaccel save``); the same on all ranks. Call ``saved``
        after the save."""
        self.is_over = False
        """Whether ``leave`` was called or the program has ended."""
        self._has_finished = False
        self._place = settings.locate(None)
        self._created = time.time()
        self._status = RankStatus()
        self._flag = install_stop_flag("stop_gate()")
        self._step = 0
        self._signs_of_life = 0
        self._save_began: float | None = None
        self._start: dict[str, Any] | None = None
        self._agreed: AgreedStop | None = None
        """Created with the group of ranks."""
        self._group: RankGroup | LoneRank
        self._clock: AttemptClock
        heartbeat = start_heartbeat(self._place.run, self._place.attempt)
        if heartbeat is not None:
            heartbeat.source = self
        if torch_distributed() is not None:
            self._join()

    def join(self) -> RankGroup | LoneRank:
        """Form the group of ranks now, not at the first step. Collective. Returns the group."""
        if self._agreed is None:
            self._join()
        return self._group

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, step: int) -> bool:
        """Report that a step is over. Collective: every rank calls this equally often, with the same numbers.

        Args:
            step: the step's number, as the program counts; larger than in the last call.

        Returns:
            Whether the program must stop now; the same on all ranks. If True, save and call ``leave``, or, if
            ``should_finish`` is True, just leave the loop. All later calls return True, too.

        Raises:
            RuntimeMisuse: another rank has left its loop.
            RankFailed: another rank has failed.
        """
        agreed = self._agreed or self._join()
        if self._status.phase != "training":
            self._enter(step)
        self._reach(step)
        if agreed.request is not None:
            return True
        if self._group.control is None:
            if not self._flag.raised:
                return self._continue(agreed, save=agreed.save_is_requested)
        else:
            decision = agreed.agreement.read()
            if decision is None or not decision.stop:
                save = decision is not None and decision.save
                agreed.agreement.issue(stop=self._flag.raised, save=agreed.save_is_requested and not save)
                return self._continue(agreed, save=save)
        return self._stop()

    def begin(
        self, step: int = 0, *, checkpoint: str | os.PathLike[str] | None = None, total_steps: int | None = None
    ) -> None:
        """Record where the training starts, for ``hpcaccel status`` and the count of lost steps. Optional.

        Args:
            step: number of steps that the loaded checkpoint contains.
            checkpoint: the loaded checkpoint; None if the training starts from scratch.
            total_steps: number of steps of the whole training.
        """
        self._start = {
            "resumed_step": step,
            "resumed_from": None if checkpoint is None else os.fspath(checkpoint),
            "total_steps": total_steps,
        }
        self._step = step
        if self._agreed is not None:
            self._write_start()

    def saved(self) -> None:
        """Record that the program has saved, after ``step`` has set ``should_save``. Requests that were made before the
        save are then honoured."""
        self.should_save = False
        if self._agreed is not None:
            self._agreed.saved()

    # -- a stop -------------------------------------------------------------------------------------------------------

    @property
    def in_time(self) -> bool:
        """Whether a save is expected to end before the processes are killed; True if unknown. It is computed when a
        stop is requested, from the median time of this attempt's saves, else from the time of the slowest earlier
        save."""
        return self._agreed is None or self._agreed.in_time

    @property
    def should_finish(self) -> bool:
        """Whether the training is to end for good. If so, leave the loop and keep the result."""
        return self._request is not None and self._request.then == "finish"

    @property
    def reason(self) -> Reason | None:
        """Why the training must stop, such as ``preempted`` or ``time_limit``; None if it need not."""
        return None if self._request is None else self._request.reason

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the processes are killed; None if no stop was requested or the time is unknown."""
        if self._request is None or self._request.deadline is None:
            return None
        return max(0.0, self._request.deadline - time.time())

    def complete(self) -> None:
        """Record that the training has done its last step. A stop that was requested then changes nothing: the program
        continues to its end, and the run is completed."""
        self._has_finished = True

    def leave(self, *, checkpoint: str | os.PathLike[str] | None = None) -> None:
        """Exit the program, after ``step`` has returned True. Collective.

        Args:
            checkpoint: path or URL of the file or directory that the program has just saved; None if it saved nothing.

        Raises:
            SystemExit: a stop was requested. The exit code is 85 if the run continues later from ``checkpoint``, 143 if
                nothing was saved, and 0 if the training ends for good (``should_finish``).
            RuntimeMisuse: no stop was requested.
        """
        agreed, request = self._agreed, self._request
        if agreed is None or request is None:
            raise RuntimeMisuse("leave(): no stop was requested. Call it after step() has returned True")
        if request.then == "finish":
            raise SystemExit(0)  # ``_at_end`` writes the outcome
        saved = self._existing(checkpoint)
        self._save_is_over(counts=saved is not None)
        if saved is not None:
            self.saved()
        logger.info("stopping at step %d (%s): %s", self._step, request.reason, _saved(saved))
        self._end()
        agreed.leave(self._outcome(request.reason, resume=True, checkpoint=saved), saved=saved is not None)

    # -- what the program is doing -------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """What the program is doing: ``starting``, or the phase that the program has set. ``step`` sets ``training``.

        The heartbeat reports the phase, and the hang watchdog allows for it. The time spent in the phase ``saving`` is
        measured, and determines how early the ranks are stopped before a time limit.
        """
        return self._status.phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase not in get_args(Phase):
            raise RuntimeMisuse(f"phase={phase!r} is not a phase (allowed: {', '.join(get_args(Phase))})")
        if self._request is None:
            if self._status.phase == "saving" != phase:
                self._save_is_over()
            if phase == "saving" and self._save_began is None:
                self._save_began = time.monotonic()
                if self._agreed is not None:
                    self._agreed.save_begins()
        self._status.phase = phase

    def sign_of_life(self) -> None:
        """Report progress between two steps, for the hang watchdog: for example after each batch of an evaluation."""
        self._signs_of_life += 1

    def activity(self) -> Activity:
        """What this process is doing, for the heartbeat."""
        exchange = None if self._agreed is None else self._group.exchange
        return Activity(
            phase=self._status.phase,
            step=self._step,
            first_step=self._status.first_step,
            batches=self._signs_of_life,
            waits_in=None if exchange is None else exchange.watchdog.waits_in,
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _join(self) -> AgreedStop:
        """Form the group of ranks, and issue the first agreement."""
        self._group = group = self._join_ranks()
        formed = time.time()
        run, attempt = self._place.run, self._place.attempt
        configure_training_log(group.rank)
        self._clock = AttemptClock(run if group.is_main else None, attempt, begun=self._created, formed=formed)
        agreed = AgreedStop(self._place, group, flag=self._flag, clock=self._clock, at_end=self._at_end)
        self._issue_first(agreed.agreement)
        self._agreed = agreed
        if self._start is not None:
            self._write_start()
        return agreed

    def _join_ranks(self) -> RankGroup | LoneRank:
        return join_default_group()

    def _issue_first(self, agreement: StopAgreement) -> None:
        """Issue the agreement that the first ``step`` reads."""
        if self._group.control is not None:
            agreement.issue(stop=self._flag.raised, save=False)

    @property
    def _request(self) -> StopRequest | None:
        return None if self._agreed is None else self._agreed.request

    def _write_start(self) -> None:
        assert self._start is not None
        self._clock.prepared()
        self._clock.begin(**self._start)
        self._clock.loaded(self._start["resumed_step"])

    def _enter(self, step: int) -> None:
        """Called at the first step, and at the first step after another phase."""
        if self._start is None:
            self._start = {"resumed_step": max(0, step - 1), "resumed_from": None, "total_steps": None}
            self._write_start()
        self._save_is_over()
        self._status.train(step)

    def _reach(self, step: int) -> None:
        """Record the number of steps done."""
        self._step = step
        self._clock.count(step)
        self._clock.step_is_over(step)
        if self._agreed is not None:
            self._agreed.step_is_over(step)

    def _continue(self, agreed: AgreedStop, *, save: bool) -> bool:
        self.should_save = save
        if save:
            agreed.save_begins()
        return False

    def _stop(self) -> bool:
        agreed = self._agreed or self._join()
        agreed.save_begins()
        agreed.read_request()
        self._save_began = time.monotonic()
        self._status.phase = "finishing" if self.should_finish else "saving"
        return True

    def _save_is_over(self, *, counts: bool = True) -> None:
        """Record the duration of the save that has just ended, if there was one."""
        began, self._save_began = self._save_began, None
        if began is not None and counts and self._agreed is not None:
            self._clock.saved(time.monotonic() - began)

    def _existing(self, checkpoint: str | os.PathLike[str] | None) -> str | None:
        """Rank 0's absolute path or URL of the checkpoint, on all ranks; None if rank 0 does not find the path."""
        found = None if checkpoint is None else os.fspath(checkpoint)
        if found is not None and "://" not in found:
            found = str(Path(found).absolute())
            if self._group.is_main and not os.path.exists(found):
                logger.error("leave(checkpoint=%r): there is no such file, so nothing counts as saved", found)
                found = None
        return self._group.from_main(found, "leave")

    def _end(self) -> None:
        self.is_over = True
        self._status.phase = "leaving"
        self._clock.end()

    def _at_end(self) -> None:
        """Called at the normal end of the program."""
        self._end()
        agreed, request = self._agreed, self._request
        assert agreed is not None, "AgreedStop calls this method"
        if request is None or request.then == "finish" or self._has_finished:
            agreed.complete(self._outcome("completed", resume=False))
        else:  # the program knew of the stop and ended without leave(): its next start shows whether it had finished
            agreed.complete(self._outcome(request.reason, resume=True))

    def _outcome(self, reason: Reason, *, resume: bool, checkpoint: str | None = None) -> Outcome:
        from hpcaccel.core.rank_records import Outcome

        return Outcome(reason=reason, step=self._step, checkpoint=checkpoint, resume=resume)


def _saved(checkpoint: str | None) -> str:
    return "nothing was saved" if checkpoint is None else f"saved {checkpoint}"
