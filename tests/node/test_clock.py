"""Tests of the time limit: when the supervisor stops the ranks, and when it queries Slurm again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.rank_records import Timing
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import JobStatus
from hpcaccel.node.allocation.scheduler_view import QUERY_SECONDS, SELDOM_SECONDS, SchedulerView
from hpcaccel.node.stop_sequence import StopSequence

from .conftest import LocalRun


class Queue:
    """A scheduler with one running job, whose end time a test can change."""

    job_id = "45"
    restart_count = 0
    nodes = ("n1",)
    kill_wait_seconds = 30.0
    proctrack = ""
    status_is_free = False
    preempted = False

    def __init__(self, seconds_left: float) -> None:
        self.seconds_left(seconds_left)

    def seconds_left(self, seconds: float) -> None:
        self.end_time = time.time() + seconds

    def status(self, *, patient: bool = True) -> JobStatus:
        return JobStatus(running=True, preempted=self.preempted, end_time=self.end_time)

    def terminated(self) -> None:
        pass

    def requeue(self) -> str:
        raise AssertionError("nobody asked for this")


class Asked:
    """Ranks that never exit, and whether a stop was requested."""

    asked = False

    def poll(self) -> int | None:
        return None

    def request_stop(self) -> None:
        self.asked = True

    def kill(self) -> None:
        raise AssertionError("nobody asked for this")


class One(NamedTuple):
    """A running attempt."""

    run: RunDir
    scheduler: SchedulerView
    stopping: Any
    caplog: pytest.LogCaptureFixture


@pytest.fixture
def attempt(local_run: Callable[..., LocalRun], caplog: pytest.LogCaptureFixture) -> Callable[..., One]:
    caplog.set_level("INFO", "hpcaccel")

    def make(queue: Queue, **resilience: int) -> One:
        run = local_run("", launch={"backend": "slurm"}, **resilience).dir
        run.attempt(1).mkdir()
        scheduler = SchedulerView(queue)  # type: ignore[arg-type]
        scheduler.query()
        return One(run, scheduler, StopSequence(run, read_launch(run), scheduler, attempt=1), caplog)

    return make


def test_ranks_are_stopped_before_the_time_limit(attempt: Callable[[Queue], One]) -> None:
    ranks = Asked()
    one = attempt(Queue(20))
    one.stopping.check_time(ranks)
    assert ranks.asked
    assert one.stopping.request is not None
    assert one.stopping.request.reason == "time_limit"


def test_end_of_a_grace_time_is_a_preemption(attempt: Callable[[Queue], One]) -> None:
    queue, ranks = Queue(20), Asked()
    one = attempt(queue)
    queue.preempted = True
    one.stopping.check_time(ranks)
    assert one.stopping.request.reason == "preempted"


def test_ranks_are_not_stopped_if_the_limit_was_extended(attempt: Callable[[Queue], One]) -> None:
    queue, ranks = Queue(20), Asked()
    one = attempt(queue)
    queue.seconds_left(3600)
    one.stopping.check_time(ranks)
    assert not ranks.asked


@pytest.mark.parametrize(
    ("granted", "left", "reason"),
    [(100, 100, "time_limit"), (100, 3600, None), (3600, 3600, "stop")],
    ids=["the limit is near", "it was extended", "somebody sent the signal by hand"],
)
def test_sigusr2_stops_the_ranks_unless_the_limit_was_extended(
    attempt: Callable[[Queue], One], granted: float, left: float, reason: str | None
) -> None:
    queue, ranks = Queue(granted), Asked()
    one = attempt(queue)
    queue.seconds_left(left)
    one.stopping.handle_signal(ranks, signal.SIGUSR2)
    assert ranks.asked is (reason is not None)
    assert (one.stopping.request.reason if one.stopping.request else None) == reason


def test_warning_that_comes_early_is_held_back_until_it_is_due(attempt: Callable[[Queue], One]) -> None:
    queue, ranks = Queue(170), Asked()
    one = attempt(queue)
    one.stopping.handle_signal(ranks, signal.SIGUSR2)
    one.stopping.check_time(ranks)
    assert not ranks.asked
    assert "received the time limit warning early: stopping the ranks in at most 50 s" in one.caplog.messages
    queue.seconds_left(119)
    one.scheduler.query()
    one.stopping.check_time(ranks)
    assert ranks.asked
    assert one.stopping.request.reason == "time_limit"


def measured(one: One, **seconds: float) -> None:
    """Write the timing of the ranks."""
    write_json(one.run.timing(1), to_dict(Timing(**seconds)))  # type: ignore[arg-type]


def test_ranks_with_slow_saves_are_stopped_earlier_and_log_has_the_time(attempt: Callable[[Queue], One]) -> None:
    queue, ranks = Queue(1000), Asked()
    one = attempt(queue)
    measured(one, step_seconds=2.0, slowest_step_seconds=40.0, slowest_save_seconds=200.0)
    one.stopping.check_time(ranks)
    assert not ranks.asked
    log = " ".join(one.caplog.messages)
    assert "two steps and a save may take 267 s" in log
    assert "Slurm kills the ranks after 30 s (KillWait)" in log
    one.scheduler.began -= 700  # 700 s have passed: 300 s of 1000 s are left
    queue.seconds_left(281)
    one.scheduler.query()
    one.stopping.check_time(ranks)
    assert ranks.asked
    assert one.stopping.request is not None
    assert one.stopping.request.reason == "time_limit"
    assert one.stopping.request.deadline == pytest.approx(queue.end_time - 15, abs=1)


def test_shortened_limit_is_noticed_at_the_next_query(attempt: Callable[[Queue], One]) -> None:
    queue, ranks = Queue(3600), Asked()
    one = attempt(queue)
    queue.seconds_left(50)
    one.stopping.check_time(ranks)
    assert not ranks.asked, "asked a moment ago"
    one.scheduler.queried_at -= QUERY_SECONDS
    one.stopping.check_time(ranks)
    assert not ranks.asked, "an end that is an hour away is asked for seldom"
    one.scheduler.queried_at -= SELDOM_SECONDS - QUERY_SECONDS
    one.stopping.check_time(ranks)
    assert ranks.asked


def test_ranks_signalled_directly_by_slurm_get_the_grace_time_as_deadline(
    attempt: Callable[[Queue], One],
) -> None:
    queue, ranks = Queue(3600), Asked()
    one = attempt(queue)
    measured(one, step_seconds=1.0, slowest_step_seconds=1.0, slowest_save_seconds=100.0)
    queue.preempted = True
    queue.seconds_left(40)
    one.stopping.handle_requests(ranks)
    assert one.stopping.request is None
    one.run.signalled(1).touch()
    one.stopping.handle_requests(ranks)
    assert one.stopping.request is not None
    assert (one.stopping.request.reason, one.stopping.request.then) == ("preempted", "requeue")
    assert one.stopping.request.deadline == pytest.approx(queue.end_time - 10, abs=1)
    assert "a save took up to 100 s, and 30 s are left" in " ".join(one.caplog.messages)


def test_preemption_without_grace_time_leaves_kill_wait(attempt: Callable[[Queue], One]) -> None:
    queue, ranks = Queue(3600), Asked()
    one = attempt(queue)
    queue.status = lambda **_: JobStatus(running=False, will_requeue=True)  # type: ignore[method-assign]
    one.stopping.handle_signal(ranks, signal.SIGTERM)
    assert one.stopping.request is not None
    assert one.stopping.request.reason == "preempted"
    assert one.stopping.request.deadline == pytest.approx(time.time() + 30, abs=1)


@pytest.mark.parametrize(
    ("status", "seconds"),
    [
        (JobStatus(running=False), 25),  # cancelled: no later job would write the end
        (JobStatus(running=False, termination_reason="preempted"), 25),
        (JobStatus(running=False, termination_reason="time_limit", requeueable=True), 22.5),
        # as seen by a trial of a sweep's worker
        (JobStatus(running=False, termination_reason="time_limit", requeueable=True, will_requeue=True), 22.5),
        (JobStatus(running=False, will_requeue=True), 30),
    ],
)
@pytest.mark.parametrize("asked_before", [True, False])
def test_deadline_leaves_time_to_write_the_end_before_slurms_kill(
    attempt: Callable[..., One], status: JobStatus, seconds: float, asked_before: bool
) -> None:
    queue, ranks = Queue(3600), Asked()
    one = attempt(queue, stop_timeout_seconds=300)
    if asked_before:  # as `hpcaccel cancel` does, a moment before its scancel
        one.stopping._stop(ranks, "cancelled", then="cancel")
    queue.status = lambda **_: status  # type: ignore[method-assign]
    one.stopping.handle_signal(ranks, signal.SIGTERM)
    assert one.stopping.request is not None
    if not asked_before:
        assert one.stopping.request.deadline == pytest.approx(time.time() + seconds, abs=1)
    left = (one.stopping._kill_at or 0) - time.monotonic()
    assert left > 30 if seconds == 30 else left == pytest.approx(seconds, abs=1)
