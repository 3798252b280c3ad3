"""Whether a worker's allocation is wanted back, and what follows: asked of the scheduler when a signal comes, and now
and then by itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcaccel.core.records import Decision, Reason
from hpcaccel.node.allocation import LocalAllocation, Situation
from hpcaccel.node.launch_spec import Launch
from hpcaccel.node.stop_sequence import ASK_SCHEDULER_SECONDS, EARLY_SECONDS, Inquiry

__all__ = ["Recall", "Stop"]

_FINALITY: dict[Decision, int] = {"requeue": 0, "pause": 1, "end": 2}


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Why this worker starts no more trials, and what follows when those in flight are gone."""

    reason: Reason
    then: Decision
    detail: str = ""
    by_scheduler: bool = False
    """The scheduler brings the worker back by itself."""

    def outdoes(self, other: Stop | None) -> bool:
        return other is None or _FINALITY[self.then] > _FINALITY[other.then]


class Recall:
    """
    Args:
        say: tells the host's log.
    """

    def __init__(self, inquiry: Inquiry, launch: Launch, *, say: Callable[[str], None]) -> None:
        self._inquiry = inquiry
        self._launch = launch
        self._say = say

    def heard(self, number: int | None, *, idle: bool) -> tuple[Stop, signal.Signals] | None:
        """What follows from the signal ``number``, or from the time that has passed where none came; and the signal on
        which the trials' supervisors ask, and find the same. None where the worker goes on.

        Args:
            idle: no trial is in flight, whose ranks would be signalled.
        """
        if number == signal.SIGUSR2:
            stop = self._warned()
            return None if stop is None else (stop, signal.SIGUSR2)
        if number in (signal.SIGTERM, signal.SIGINT):
            if isinstance(self._inquiry.allocation, LocalAllocation):
                self._inquiry.allocation.cancelled()
            return self._wish(self._inquiry.ask()) or Stop(reason="stop", then="requeue"), signal.SIGTERM
        late = time.time() - self._inquiry.asked > ASK_SCHEDULER_SECONDS if idle else self._inquiry.is_due
        if self._launch.local or late:
            # In a preemption with grace time Slurm signals ranks alone, and there may have been none. The supervisors
            # of trials read the answer.
            return self.look()
        return None

    def look(self) -> tuple[Stop, signal.Signals] | None:
        """The same, from what the scheduler says now."""
        now = self._inquiry.ask(patient=False)
        stop = self._wish(now)
        return None if stop is None else (stop, signal.SIGUSR2 if now.running else signal.SIGTERM)

    def _warned(self) -> Stop | None:
        """SIGUSR2, as a supervisor understands it."""
        inquiry = self._inquiry
        stop, end_time = self._wish(inquiry.ask()), inquiry.end_time
        limit = self._launch.resilience.warning_seconds + EARLY_SECONDS
        if stop is None and end_time is not None and end_time - time.time() > limit:
            if inquiry.granted is not None and end_time > inquiry.granted + 1:
                self._say("a warning came, but the time limit was extended: going on")
                return None
            return Stop(reason="stop", then="requeue", detail="somebody's own signal")
        return stop or Stop(reason="time_limit", then="requeue")

    def _wish(self, now: Situation) -> Stop | None:
        """What the scheduler wants with this allocation, where it wants anything."""
        if not now.known:
            return None
        if now.running:
            if now.preempted:
                return Stop(reason="preempted", then="requeue")
            return Stop(reason="time_limit", then="requeue") if self._is_late(now.end_time) else None
        if now.comes_back:
            reason: Reason = now.taken_for or ("lost" if now.failed_nodes else "preempted")
            return Stop(reason=reason, then="requeue", by_scheduler=True)
        if now.requeueable and now.taken_for is not None:
            return Stop(reason=now.taken_for, then="requeue")
        return Stop(reason=now.taken_for or "cancelled", then="end", detail="other workers may go on with its trials")

    def _is_late(self, end_time: float | None) -> bool:
        """Whether the end is near. Trials know how long they take, and leave earlier where they must."""
        if end_time is None:
            return False
        # Slurm's own warning comes before this; it is for a warning that got lost, and for the local backend.
        warning = self._launch.resilience.warning_seconds * (1.0 if self._launch.local else 0.5)
        return time.time() > end_time - min(warning, (end_time - self._inquiry.began) / 2)
