"""``SnapshotSchedule``: takes the loop's snapshots in memory when they are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hpcaccel.runtime.training.loop_context import LoopContext

__all__ = ["SnapshotSchedule"]

LARGEST_SHARE = 0.01
"""With ``auto``: fraction of the training's time that snapshots may cost."""
FIRST_STEPS = 20
"""With ``auto``: steps before the first snapshot, and before the next one if the step time is not known yet."""


class SnapshotSchedule:
    """Takes snapshots at steps on which all ranks have agreed.

    Args:
        doubts: returns reasons why a snapshot taken now is not bit-exact. Collective.
    """

    def __init__(self, context: LoopContext, *, doubts: Callable[[], Sequence[str]]) -> None:
        self._context = context
        self._snapshots = context.snapshots
        self._doubts = doubts
        self._every = context.settings.snapshot_every_steps
        self._is_managed = False
        self.due_step = math.inf
        """The step after which the next snapshot is due. Read at every step."""

    def manage(self) -> None:
        """Take snapshots from now on: the script uses the loop's methods."""
        self._is_managed = True
        self.begin_at(self._context.counters.step)

    def begin_at(self, step: int) -> None:
        """Schedule the next snapshot. The state of ``step`` has just been loaded."""
        if self._is_managed and self._snapshots.is_on:
            self.due_step = self._next(step, self._every if isinstance(self._every, int) else FIRST_STEPS)

    def take(self) -> None:
        """Take a snapshot, and schedule the next one. Collective."""
        context = self._context
        context.metrics.flush()
        step = context.group.max_of(context.counters.step)
        cost = self._snapshots.take(context.counters, step=step, epoch=context.counters.epoch, doubts=self._doubts())
        context.clock.stalled(cost)
        if not self._snapshots.is_on:
            self.due_step = math.inf
        elif isinstance(self._every, int):
            self.due_step = self._next(step, self._every)
        else:
            seconds = context.clock.median_step_seconds
            interval = FIRST_STEPS if not seconds else math.ceil(cost / (LARGEST_SHARE * seconds))
            self.due_step = step + context.group.from_main(max(1, interval), what="the interval of snapshots")

    @staticmethod
    def _next(step: int, every: int) -> int:
        return (step // every + 1) * every
