"""Tests of how a sweep's worker stops when Slurm reclaims its allocation."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from hpcaccel.node.allocation import JobStatus
from hpcaccel.node.sweep.reclaimed_allocation import ReclaimedAllocation, Stop

TIME_LIMIT = JobStatus(running=False, termination_reason="time_limit")
REQUEUEABLE = JobStatus(running=False, termination_reason="time_limit", requeueable=True)


@pytest.mark.parametrize(
    ("status", "reason", "then", "by_scheduler"),
    [
        (JobStatus(running=True), "stop", "requeue", False),
        (JobStatus(running=True, preempted=True), "preempted", "requeue", False),
        (JobStatus(running=False, will_requeue=True), "preempted", "requeue", True),
        (JobStatus(running=False, will_requeue=True, failed_nodes=("n1",)), "lost", "requeue", True),
        (REQUEUEABLE, "time_limit", "requeue", False),
        (TIME_LIMIT, "time_limit", "end", False),
        (JobStatus(running=False, termination_reason="preempted"), "preempted", "end", False),
        (JobStatus(running=False), "cancelled", "end", False),
        (JobStatus(running=False, known=False), "stop", "requeue", False),
    ],
)
def test_stop_after_sigterm_depends_on_the_job_status(
    status: JobStatus, reason: str, then: str, by_scheduler: bool
) -> None:
    allocation = SimpleNamespace(terminated=lambda: None)
    scheduler: Any = SimpleNamespace(allocation=allocation, query=lambda: status, began=0.0, end_time=None)
    scheduler.was_extended = False
    launch: Any = SimpleNamespace(local=False, resilience=SimpleNamespace(warning_seconds=120))
    heard = ReclaimedAllocation(scheduler, launch).check(signal.SIGTERM, idle=True)
    assert heard is not None
    stop, number = heard
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.then, stop.by_scheduler, number) == (reason, then, by_scheduler, signal.SIGTERM)
