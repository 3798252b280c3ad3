"""``SaveSchedule``: carries out the loop's saves when they are due, and keeps track of background saves."""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.distributed.collectives.call_site import script_frame
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.training.agreed_stop import AgreedStop
from hpcaccel.runtime.training.loop_context import LoopContext
from hpcaccel.runtime.training.snapshot_schedule import SnapshotSchedule
from hpcaccel.runtime.training.stop_agreement import BUSY, DONE, FAILED

__all__ = ["SaveSchedule"]

logger = logging.getLogger(TRAINING_LOG)

SPREAD_PART = 0.8
"""Part of the time until the next save over which a background save may spread its writes. The rest is a margin for
steps that become faster. ``write_pace.LOWEST_RATE`` bounds how late the commit comes in a long interval."""
_PROGRESS = {"done": DONE, "busy": BUSY, "failed": FAILED}


class SaveSchedule:
    """Saves at steps on which all ranks have agreed. Methods that save or wait are collective: all ranks call them."""

    def __init__(self, context: LoopContext, stop: AgreedStop) -> None:
        self.checkpoints = context.checkpoints
        self.has_place = context.checkpoints.has_place
        self.is_managed = False
        """Whether the script uses the loop's methods. Otherwise nothing is saved by schedule."""
        self.step = 0
        """Step of the checkpoint that was last loaded or saved, or is being saved."""
        self._committed_step = 0
        """While a background save is in progress: step of the last committed checkpoint."""
        self._skipped_step = 0
        """The last step whose save was due but skipped."""
        self._exactness = context.exactness
        self._group = context.group
        self._settings = context.settings
        self._counters = context.counters
        self._metrics = context.metrics
        self._clock = context.clock
        self._context = context
        self._is_main = context.group.is_main
        self._stop = stop
        self.snapshots = SnapshotSchedule(context, doubts=lambda: self._doubts(()))
        """The snapshots in memory, which are taken in addition to saves."""
        self.due_step = self.due_time = math.inf
        """The step after which, and the time (``time.monotonic``) at which, the next save is due. Read at every
        step."""
        self.begin_at(0)

    @property
    def in_flight(self) -> bool:
        """Whether there is a background save whose result the ranks have not agreed on yet."""
        return self.checkpoints.in_flight

    @property
    def background_progress(self) -> int:
        """Progress of this rank's background save, for the agreement: ``DONE``, ``BUSY`` or ``FAILED``."""
        return _PROGRESS[self.checkpoints.progress()] if self.checkpoints.in_flight else DONE

    @property
    def newest(self) -> str | None:
        """Name of the last checkpoint; None if there is none."""
        return checkpoint_files.checkpoint_name(self.step) if self.step else None

    def is_due(self, step: int) -> bool:
        """Whether a save of ``step`` is due, or was requested. Only rank 0's clock and requests count."""
        return step >= self.due_step or time.monotonic() >= self.due_time or self.is_requested

    @property
    def is_requested(self) -> bool:
        """Whether ``hpcaccel save`` has requested a save that has not begun, and a save is possible."""
        return self._stop.save_is_requested and self.is_managed and self.has_place

    def manage(self) -> None:
        """Save by schedule from now on."""
        self.is_managed = True
        self._schedule()
        self.snapshots.manage()

    def warn_if_no_directory(self) -> None:
        """On rank 0, warn if the script expects saves and there is no directory for them."""
        if not self.is_managed or self.has_place or not self._is_main:
            return
        # Counted, because a step may be over in any of the calls that ``StepBoundary`` lists.
        frame, script, level = sys._getframe(), script_frame(), 1
        while script is not None and frame is not script and frame.f_back is not None:
            frame, level = frame.f_back, level + 1
        warnings.warn(
            "nothing will be saved: there is no run directory. Submit the script with hpcaccel, or pass "
            "Accelerator(project_dir=...)",
            stacklevel=level,
        )

    def begin_at(self, step: int, *, state_step: int | None = None) -> None:
        """Schedule the next save. The checkpoint of ``step`` has just been loaded or saved.

        Args:
            state_step: the step of the state that was loaded, if a load is the reason for this call.
        """
        self.step = step
        self._saved_at = time.monotonic()
        self._schedule()
        if state_step is not None:
            self.snapshots.begin_at(state_step)

    def _schedule(self) -> None:
        """Compute when the next save is due, so that looking for it is cheap."""
        every, minutes = self._settings.every_steps, self._settings.every_minutes
        if not (self.has_place and self.is_managed):
            return
        if every is not None:
            self.due_step = (max(self.step, self._skipped_step) // every + 1) * every
        if minutes is not None and self._is_main:
            self.due_time = self._saved_at + 60 * minutes

    def now(
        self,
        reason: str,
        directory: Path | None = None,
        *,
        missing: Sequence[int] = (),
        background: bool = False,
        spread_seconds: float = 0.0,
    ) -> Path:
        """Save on all ranks together. If they have done different numbers of steps, the largest number is used.

        Args:
            missing: ranks that do not take part. If there are any, rank 0 saves alone, and the schedule ignores this
                save, because the other ranks have no record of it.
            background: whether to return once a snapshot is taken, where possible; see ``CheckpointManager.save``.
            spread_seconds: see ``CheckpointManager.save``.

        Returns:
            The checkpoint's directory.
        """
        with self._context.status.during("saving"), self._clock.saving():
            self._stop.save_begins()
            self._metrics.flush()
            step = self._counters.step if missing else self._group.max_of(self._counters.step)
            doubts = self._doubts(missing)
            path = self.checkpoints.save(
                self._counters,
                doubts=doubts,
                step=step,
                epoch=self._counters.epoch,
                reason=reason,
                directory=directory,
                missing=missing,
                background=background,
                spread_seconds=spread_seconds,
            )
        if directory is None and not missing:
            self._stop.saved()
            self._committed_step = self.step
            self.begin_at(step)
        return path

    def _doubts(self, missing: Sequence[int]) -> list[str]:
        """Reasons why the checkpoint is not bit-exact, collected from all ranks that take part."""
        found = self._exactness.doubts(self._counters.step, self._counters.epoch)
        if self._settings.deterministic and self._group.exchange is not None and not missing:
            every = self._group.exchange.objects_from_all(found, what="the guarantee of a checkpoint")
            found = list(dict.fromkeys(text for rank in every for text in rank))
        if found and self._settings.deterministic:
            self._context.log_once(f"checkpoints are state-exact, not bit-exact: {'; '.join(found)}")
        return found

    def due(self) -> None:
        """Carry out a scheduled save. With ``when_busy: skip``, skip it if the previous save is still in progress."""
        step = self._counters.step
        if self.in_flight and self._settings.when_busy == "skip":
            self._skipped_step, self._saved_at = step, time.monotonic()
            self._schedule()
            self._context.log_once(
                f"the checkpoint of step {step} is skipped, because the previous one is still being written "
                "(checkpoint.when_busy: skip)"
            )
            return
        background = self._settings.background
        self.now("due", background=background, spread_seconds=self._spread_seconds() if background else 0.0)

    def _spread_seconds(self) -> float:
        """Time over which the writes of a save that begins now may be spread: ``SPREAD_PART`` of the time until the
        next one, which is expected to be as long as that since the last save, or as so many steps usually take if that
        is less. 0 if ``hpcaccel save`` waits for this save. Collective."""
        seconds = 0.0 if self.is_requested else time.monotonic() - self._saved_at
        every, per_step = self._settings.every_steps, self._clock.median_step_seconds
        if every is not None and per_step is not None:
            seconds = min(seconds, every * per_step)
        milliseconds = int(1000 * SPREAD_PART * seconds)
        return -self._group.max_of(-milliseconds, "the pace of a save") / 1000

    def finish_background(self, *, failed: bool) -> None:
        """Finish the background save, after the ranks have agreed that it has ended.

        Raises:
            CheckpointError: on all ranks, if the save failed.
        """
        if failed:
            self._fall_back()
        self.checkpoints.settle(failed=failed)

    def wait(self) -> None:
        """Wait for the background save. If it failed, log the error and reset ``step``, so that ``if_newer`` saves
        again."""
        try:
            with self._clock.waiting():
                self.checkpoints.drain()
        except CheckpointError as error:
            logger.info("%s", error)
            self._fall_back()

    def _fall_back(self) -> None:
        """Reset ``step`` to the last committed save, because the background save has failed."""
        self.step = self._committed_step
        self._schedule()

    def if_newer(self, reason: str) -> None:
        """Wait for the last save. Save again if steps were done since then and there is a checkpoint directory."""
        self.wait()
        if self.has_place and self._group.max_of(self._counters.step) > self.step:
            self.now(reason)

    def commit_snapshot(self, reason: str, *, deadline: float | None) -> None:
        """If no save is in progress, and a snapshot in memory is newer than the last checkpoint, write it to the disk
        until ``deadline`` (seconds since the epoch; None if unknown)."""
        if not self.has_place or self.in_flight:
            return
        with self._context.status.during("saving"):
            step = self.checkpoints.commit_snapshot(self._context.snapshots, reason, deadline=deadline)
        if step is not None:
            self.begin_at(step)

    def saved_description(self) -> str:
        """Text for the log of a stop: which steps are saved, and which are lost."""
        step = self._counters.step
        if not (self.has_place and step):
            return "nothing was saved"
        if self.step >= step:
            return f"saved as {checkpoint_files.checkpoint_name(step)}"
        return (
            f"no time to save, which takes about {self._clock.expected_save_seconds or 0:.0f} s. Steps "
            f"{self.step + 1} to {step} are lost and will be repeated from {self.newest or 'the beginning'}"
        )
