"""Decides, after each signal and at intervals, whether a sweep's worker must leave its allocation and what follows."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass

from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.records import Decision, Reason
from hpcaccel.node.allocation import JobStatus
from hpcaccel.node.allocation.scheduler_view import QUERY_SECONDS, SchedulerView, SignalMeaning, signal_meaning

__all__ = ["ReclaimedAllocation", "Stop"]

_FINALITY: dict[Decision, int] = {"requeue": 0, "pause": 1, "end": 2}
"""A stop replaces an earlier stop if the new stop's decision has the higher number."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Why the worker starts no more trials, and what follows once the running trials have ended."""

    reason: Reason
    then: Decision
    detail: str = ""
    by_scheduler: bool = False
    """Whether the scheduler restarts the worker by itself."""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.reason}{detail}; decision: {self.then}"

    def outdoes(self, other: Stop | None) -> bool:
        return other is None or _FINALITY[self.then] > _FINALITY[other.then]


class ReclaimedAllocation:
    def __init__(self, scheduler: SchedulerView, launch: LaunchSpec) -> None:
        self._scheduler = scheduler
        self._launch = launch

    def check(self, number: int | None, *, idle: bool) -> tuple[Stop, signal.Signals] | None:
        """Evaluate the signal ``number``, or the scheduler's status if there is no stop signal and a query is due.

        Args:
            idle: whether no trial is running, so that there are no ranks that Slurm could signal.

        Returns:
            None if the worker continues; else the stop, and the signal to forward to the trials' supervisors. A
            supervisor that gets the signal queries the scheduler itself.
        """
        scheduler = self._scheduler
        if number in (signal.SIGTERM, signal.SIGINT):
            scheduler.allocation.terminated()
        elif number != signal.SIGUSR2:
            overdue = scheduler.is_due or (idle and time.time() - scheduler.queried_at > QUERY_SECONDS)
            # At the start of a grace time Slurm signals only ranks, and there may have been none. The worker must
            # query, because without a signal the trials' supervisors only read the status that it shares.
            return self.query() if overdue else None
        meaning = self._meaning(number, scheduler.query())
        if meaning is None:
            log.info("received the time limit warning, but the limit has been extended: continuing")
            return None
        by_hand = number == signal.SIGUSR2 and meaning.reason == "stop"
        stop = _stop_for(meaning, detail="signal sent by a user" if by_hand else "")
        return stop, signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM

    def query(self) -> tuple[Stop, signal.Signals] | None:
        """Query the scheduler now and evaluate the job's status. Returns the same as ``check``."""
        status = self._scheduler.query(patient=False)
        meaning = self._meaning(None, status)
        if meaning is None:
            return None
        return _stop_for(meaning), signal.SIGUSR2 if status.running else signal.SIGTERM

    def _meaning(self, number: int | None, status: JobStatus) -> SignalMeaning | None:
        scheduler = self._scheduler
        return signal_meaning(
            number,
            status,
            warning_seconds=self._launch.resilience.warning_seconds,
            end_time=scheduler.end_time,
            was_extended=scheduler.was_extended,
            is_late=self._is_late(scheduler.end_time),
        )

    def _is_late(self, end_time: float | None) -> bool:
        """Whether the time limit is near. Trials stop earlier on their own if their saves take longer."""
        if end_time is None:
            return False
        # Slurm's own warning comes earlier. This check is for a lost warning and for the local backend.
        warning = self._launch.resilience.warning_seconds * (1.0 if self._launch.local else 0.5)
        return time.time() > end_time - min(warning, (end_time - self._scheduler.began) / 2)


def _stop_for(meaning: SignalMeaning, *, detail: str = "") -> Stop:
    if meaning.job == "ends":
        return Stop(reason=meaning.reason, then="end", detail="other workers may continue this worker's trials")
    return Stop(reason=meaning.reason, then="requeue", detail=detail, by_scheduler=meaning.job == "returns")
