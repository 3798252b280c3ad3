"""The scheduler's view of this allocation: when to query Slurm, the last status, and the meaning of a signal.

Each query takes time on Slurm's controller, so a supervisor queries after a signal and otherwise rarely. The
supervisors of a sweep's trials need the job's times at the start of each trial. They read the status that their worker
shares in ``workers/<i>/job.json``, because short trials would otherwise cause hundreds of queries a minute.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.records import Reason
from hpcaccel.node.allocation import Allocation, JobStatus

__all__ = [
    "KILL_WAIT",
    "PROCTRACK",
    "WORKER_JOB",
    "SchedulerView",
    "SharedJobStatus",
    "SignalMeaning",
    "read_shared_status",
    "signal_meaning",
    "write_shared_status",
]

QUERY_SECONDS = 60.0
"""Shortest interval between routine queries."""
SELDOM_SECONDS = 300.0
"""Longest interval between queries. Slurm does not notify a job whose time limit was shortened, so the job polls. It
polls rarely while its end is far away, because all tasks of an array poll. If less than this interval is left after the
change, the job may detect the change only through Slurm's own warning."""
EARLY_SECONDS = 90
"""Slurm may send its warning signal up to 60 seconds early. A warning that arrives more than this number of seconds
early is for a time limit that has been extended since, or was sent by a user."""
FRESH_SECONDS = 5.0
"""A status that was queried this recently need not be queried again before ranks start: their supervisor has just
queried it to decide on a restart."""
WORKER_JOB = "HPCACCEL_WORKER_JOB"
"""Environment variable for a trial's supervisor: the path of ``job.json``."""
KILL_WAIT = "HPCACCEL_KILL_WAIT"
"""Environment variable for a trial's supervisor: the cluster's KillWait in seconds."""
PROCTRACK = "HPCACCEL_PROCTRACK"
"""Environment variable for a trial's supervisor: the cluster's ProctrackType."""
OLDEST_SECONDS = 2 * SELDOM_SECONDS
"""Maximum age of a shared status. A worker queries more often than this unless its queries fail."""


@dataclass(frozen=True, kw_only=True)
class SharedJobStatus:
    """A status queried by another process of this allocation."""

    status: JobStatus
    queried_at: float
    """Seconds since the epoch."""


class SchedulerView:
    """The last status of this allocation, and the job's times (seconds since the epoch).

    Args:
        shared: returns a recent status queried by another process of this allocation, or None.
    """

    def __init__(self, allocation: Allocation, *, shared: Callable[[], SharedJobStatus | None] = lambda: None) -> None:
        self.allocation = allocation
        self._shared = shared
        self.began = time.time()
        self.queried_at = 0.0
        self.last_status: JobStatus | None = None
        self.end_time: float | None = None
        self.granted_end_time: float | None = None
        """The first end time that the scheduler reported. If ``end_time`` is later, the time limit was extended."""
        self.queued_at: float | None = None
        self.allocated_at: float | None = None
        self.over_since: float | None = None
        """When a query first found that the allocation is being terminated. Slurm's accounting does not count the time
        after that."""

    def query(self, *, patient: bool = True) -> JobStatus:
        """Query the scheduler, see ``Allocation.status``."""
        before = time.time()
        status = self.allocation.status(patient=patient)
        self._update(status, before=before, queried_at=time.time())
        return status

    def refresh(self, *, patient: bool = True) -> None:
        """Like ``query``, but use a shared status if there is one, or a status from the last ``FRESH_SECONDS``. A
        shared status may be some minutes old: its times are reliable, but it does not show recent events."""
        last = self.last_status
        is_fresh = last is not None and last.known and last.running and time.time() - self.queried_at < FRESH_SECONDS
        if (shared := self._shared()) is None:
            if not is_fresh:
                self.query(patient=patient)
        elif shared.queried_at > self.queried_at:
            self._update(shared.status, before=shared.queried_at, queried_at=shared.queried_at)

    @property
    def is_due(self) -> bool:
        """Whether it is time for another query."""
        if self.allocation.status_is_free:
            return True
        now = time.time()
        left = 0.0 if self.end_time is None else self.end_time - now
        return now - self.queried_at > min(SELDOM_SECONDS, max(QUERY_SECONDS, left / 10))

    @property
    def was_extended(self) -> bool:
        """Whether the time limit was extended since this process first queried it."""
        if self.granted_end_time is None or self.end_time is None:
            return False
        return self.end_time > self.granted_end_time + 1

    def _update(self, status: JobStatus, *, before: float, queried_at: float) -> None:
        self.queried_at, self.last_status = queried_at, status
        if status.known and not status.running and self.over_since is None:
            self.over_since = before
        if status.known and status.running:
            self.end_time = status.end_time
            self.queued_at, self.allocated_at = status.submit_time, status.start_time
            self.granted_end_time = self.granted_end_time or status.end_time


@dataclass(frozen=True, kw_only=True)
class SignalMeaning:
    """Why the job must leave its allocation, and how the run continues."""

    reason: Reason
    job: Literal["requeue", "returns", "ends"]
    """requeue: the batch step must requeue the job; returns: the scheduler restarts the job, or starts the next job of
    its chain; ends: nothing restarts the job."""

    @property
    def is_cancel(self) -> bool:
        return self.reason == "cancelled" and self.job == "ends"


def signal_meaning(
    number: int | None,
    status: JobStatus,
    *,
    warning_seconds: float,
    end_time: float | None = None,
    was_extended: bool = False,
    is_late: bool = False,
) -> SignalMeaning | None:
    """What signal ``number`` means, given the job's current status; None if the job continues.

    Args:
        number: SIGUSR2, which Slurm sends before the time limit and at the start of a grace time; SIGTERM, which
            Slurm sends when it terminates the job; SIGINT, treated like SIGTERM; None if no signal arrived.
        warning_seconds: how long before the time limit Slurm sends its warning, as requested.
        end_time: when the time limit is reached (seconds since the epoch).
        was_extended: see ``SchedulerView.was_extended``.
        is_late: whether the end is so near that the ranks must stop now.
    """
    if status.known and not status.running:
        return _taken_down(status)
    if status.known and status.preempted:
        return SignalMeaning(reason="preempted", job="requeue")
    if status.known and is_late:
        return SignalMeaning(reason="time_limit", job="requeue")
    if number == signal.SIGUSR2:
        if end_time is None or end_time - time.time() <= warning_seconds + EARLY_SECONDS:
            return SignalMeaning(reason="time_limit", job="requeue")
        if was_extended:
            return None
    return None if number is None else SignalMeaning(reason="stop", job="requeue")


def _taken_down(status: JobStatus) -> SignalMeaning:
    if status.will_requeue:
        reason: Reason = status.termination_reason or ("lost" if status.failed_nodes else "preempted")
        return SignalMeaning(reason=reason, job="returns")
    if status.termination_reason is None:
        return SignalMeaning(reason="cancelled", job="ends")
    return SignalMeaning(reason=status.termination_reason, job="requeue" if status.requeueable else "ends")


def write_shared_status(path: Path, status: JobStatus, *, queried_at: float) -> None:
    """Write ``status`` to ``path`` if the job is running and not preempted. For any other known status, remove the
    file, so that each trial queries the scheduler itself. If the status is unknown, leave the file unchanged, so that
    the trials need not query."""
    if not status.known:
        return
    if not status.running or status.preempted:
        path.unlink(missing_ok=True)
        return
    document: dict[str, Any] = {
        "asked": queried_at,
        "running": True,
        "preempted": False,
        "comes_back": False,
        "taken_for": None,
        "requeueable": False,
        "failed_nodes": [],
        "submit_time": status.submit_time,
        "start_time": status.start_time,
        "end_time": status.end_time,
        "known": True,
    }
    write_json(path, document, sync=False)


def read_shared_status(path: Path) -> SharedJobStatus | None:
    """The status that the worker shares; None if there is no such status or it is too old."""
    value = read_json(path)
    if value is None or time.time() - value["asked"] > OLDEST_SECONDS:
        return None
    times: dict[str, Any] = {name: value.get(name) for name in ("submit_time", "start_time", "end_time")}
    return SharedJobStatus(status=JobStatus(running=True, **times), queried_at=value["asked"])
