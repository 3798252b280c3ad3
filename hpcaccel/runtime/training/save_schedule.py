"""The loop's saves: which steps are due, what is on its way in the background, and what a stop would lose now."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.saver import Saver
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.training.activity import Activity
from hpcaccel.runtime.training.attempt_timing import Clock
from hpcaccel.runtime.training.counters import Counters
from hpcaccel.runtime.training.exactness import Exactness
from hpcaccel.runtime.training.metrics_writer import MetricsWriter
from hpcaccel.runtime.training.stop_agreement import BUSY, DONE, FAILED

__all__ = ["Saves"]

_WORDS = {"done": DONE, "busy": BUSY, "failed": FAILED}


class Saves:
    """Saves at a step that all ranks have agreed on; every method but ``is_due`` is called by all of them alike."""

    def __init__(
        self,
        saver: Saver,
        *,
        exactness: Exactness,
        group: Group,
        settings: Settings,
        counters: Counters,
        metrics: MetricsWriter,
        clock: Clock,
        activity: Activity,
    ) -> None:
        self.saver = saver
        self.has_place = saver.has_place
        self.step = 0
        """The last step that is saved, or about to be."""
        self._landed_step = 0
        """The one before, while a save is under way in the background."""
        self._passed_over = 0
        """The last step whose save was due and left out."""
        self._exactness = exactness
        self._group = group
        self._settings = settings
        self._counters = counters
        self._metrics = metrics
        self._clock = clock
        self._activity = activity
        self._is_main = group.is_main
        self._due_step = self._due_time = math.inf
        self.begin_at(0)

    @property
    def in_flight(self) -> bool:
        """Whether a save is under way in the background, of which not all ranks know yet how it went."""
        return self.saver.in_flight

    @property
    def word(self) -> int:
        """This rank's part in what the ranks agree on: how far its save is."""
        return _WORDS[self.saver.progress()] if self.saver.in_flight else DONE

    @property
    def newest(self) -> str | None:
        """The name of the last checkpoint."""
        return checkpoint_files.checkpoint_name(self.step) if self.step else None

    def is_due(self, step: int) -> bool:
        """Whether the schedule wants ``step`` saved. The clock that counts is rank 0's."""
        return step >= self._due_step or time.monotonic() >= self._due_time

    def begin_at(self, step: int) -> None:
        """The training goes on from the checkpoint of ``step``."""
        self.step = step
        self._saved_at = time.monotonic()
        self._schedule()

    def _schedule(self) -> None:
        """Find out when the next save is due, for every step asks."""
        every, minutes = self._settings.every_steps, self._settings.every_minutes
        if self.has_place and every is not None:
            self._due_step = (max(self.step, self._passed_over) // every + 1) * every
        if self.has_place and minutes is not None and self._is_main:
            self._due_time = self._saved_at + 60 * minutes

    def now(
        self, reason: str, directory: Path | None = None, *, missing: Sequence[int] = (), background: bool = False
    ) -> Path:
        """Save, at the same step on all ranks; where ranks have done unequal numbers, the largest names it.

        Args:
            missing: ranks that take no part; then this is rank 0 alone, of whose save the others do not know, so that
                it counts for nothing when the ranks agree on what is to be saved.
            background: go on as soon as a snapshot is taken.
        """
        with self._activity.during("saving"), self._clock.saving():
            self._metrics.flush()
            step = self._counters.step if missing else self._group.max_of(self._counters.step)
            doubts = self._doubts(missing)
            path = self.saver.save(
                self._counters,
                doubts=doubts,
                step=step,
                epoch=self._counters.epoch,
                reason=reason,
                directory=directory,
                missing=missing,
                background=background,
            )
        if directory is None and not missing:
            self._landed_step = self.step
            self.begin_at(step)
        return path

    def _doubts(self, missing: Sequence[int]) -> list[str]:
        """What speaks against calling the checkpoint bit-exact, on any rank that takes part."""
        found = self._exactness.doubts(self._counters.step, self._counters.epoch)
        if self._settings.deterministic and self._group.exchange is not None and not missing:
            from hpcaccel.runtime.distributed.collectives.objects import from_all

            every = from_all(self._group.exchange, found, what="what a checkpoint can promise")
            found = list(dict.fromkeys(text for rank in every for text in rank))
        if found and self._settings.deterministic:
            self._activity.say_once(f"checkpoints are state-exact, not bit-exact: {'; '.join(found)}")
        return found

    def due(self) -> None:
        """Save as the schedule wants it, or leave it out while the save before is still on its way."""
        step = self._counters.step
        if self.in_flight and self._settings.when_busy == "skip":
            self._passed_over, self._saved_at = step, time.monotonic()
            self._schedule()
            self._activity.say_once(
                f"the checkpoint of step {step} is left out, because the one before is still being written "
                "(checkpoint.when_busy: skip). Later ones are left out in silence"
            )
            return
        self.now("due", background=self._settings.background)

    def land(self, *, failed: bool) -> None:
        """All ranks know that the save in the background is over.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if failed:
            self._fall_back()
        self.saver.settle(failed=failed)

    def wait(self) -> None:
        """Before leaving. A save that failed is not the last word: whoever leaves saves once more."""
        try:
            with self._clock.waiting():
                self.saver.drain()
        except CheckpointError as error:
            self._activity.say(str(error))
            self._fall_back()

    def _fall_back(self) -> None:
        """The last save has failed: the one before it counts."""
        self.step = self._landed_step
        self._schedule()

    def if_newer(self, reason: str) -> None:
        """Save what has been done since the last save, if anything, after that one is on the disk."""
        self.wait()
        if self.has_place and self._group.max_of(self._counters.step) > self.step:
            self.now(reason)

    def what_is_saved(self) -> str:
        """For the line that tells of a stop."""
        step = self._counters.step
        if not (self.has_place and step):
            return "nothing to save"
        if self.step >= step:
            return f"saved as {checkpoint_files.checkpoint_name(step)}"
        return (
            f"a save takes about {self._clock.expected_save_seconds or 0:.0f} s, and there is less time. Steps "
            f"{self.step + 1} to {step} are lost, and done again from {self.newest or 'the beginning'}"
        )
