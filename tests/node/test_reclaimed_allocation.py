"""What a sweep's worker makes of what Slurm says about its allocation."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from hpcaccel.node.allocation import Situation
from hpcaccel.node.sweep.reclaimed_allocation import Recall, Stop

TIME_LIMIT = Situation(running=False, taken_for="time_limit")
REQUEUEABLE = Situation(running=False, taken_for="time_limit", requeueable=True)


@pytest.mark.parametrize(
    ("situation", "reason", "then", "by_scheduler"),
    [
        (Situation(running=True), "stop", "requeue", False),
        (Situation(running=True, preempted=True), "preempted", "requeue", False),
        (Situation(running=False, comes_back=True), "preempted", "requeue", True),
        (Situation(running=False, comes_back=True, failed_nodes=("n1",)), "lost", "requeue", True),
        (REQUEUEABLE, "time_limit", "requeue", False),
        (TIME_LIMIT, "time_limit", "end", False),
        (Situation(running=False, taken_for="preempted"), "preempted", "end", False),
        (Situation(running=False), "cancelled", "end", False),
        (Situation(running=False, known=False), "stop", "requeue", False),
    ],
)
def test_what_follows_from_sigterm(situation: Situation, reason: str, then: str, by_scheduler: bool) -> None:
    inquiry: Any = SimpleNamespace(allocation=None, ask=lambda: situation)
    launch: Any = SimpleNamespace(local=False, resilience=SimpleNamespace(warning_seconds=120))
    inquiry.began, inquiry.end_time = 0.0, None
    heard = Recall(inquiry, launch, say=lambda _: None).heard(signal.SIGTERM, idle=True)
    assert heard is not None
    stop, number = heard
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.then, stop.by_scheduler, number) == (reason, then, by_scheduler, signal.SIGTERM)
