"""The time limit: what the supervisor believes of it, and when it asks again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hpcaccel.node.allocation import Situation
from hpcaccel.node.launch import read_launch
from hpcaccel.node.supervisor import Supervisor

from .conftest import LocalRun


class Queue:
    """A scheduler with one running job, whose end time anybody may move."""

    job_id = "45"
    restart_count = 0
    nodes = ("n1",)

    def __init__(self, seconds_left: float) -> None:
        self.seconds_left(seconds_left)

    def seconds_left(self, seconds: float) -> None:
        self.end_time = time.time() + seconds

    def situation(self, *, patient: bool = True) -> Situation:
        return Situation(running=True, end_time=self.end_time)

    def requeue(self) -> str:
        raise AssertionError("nobody asked for this")


class Asked:
    """Ranks that run for ever, and whether they were asked to stop."""

    asked = False

    def poll(self) -> int | None:
        return None

    def ask(self) -> None:
        self.asked = True

    def kill(self) -> None:
        raise AssertionError("nobody asked for this")


@pytest.fixture
def supervisor(local_run: Callable[..., LocalRun]) -> Callable[[Queue], Supervisor]:
    def make(queue: Queue) -> Supervisor:
        run = local_run("", launch={"backend": "slurm"})
        run.dir.attempt(1).mkdir()
        supervisor = Supervisor(run.dir, read_launch(run.dir), queue)  # type: ignore[arg-type]
        supervisor.attempt = 1
        supervisor._ask_scheduler()
        return supervisor

    return make


def test_the_end_of_the_time_stops_the_ranks(supervisor: Callable[[Queue], Supervisor]) -> None:
    ranks = Asked()
    one = supervisor(Queue(20))
    one._watch_clock(ranks)
    assert ranks.asked
    assert one.stop is not None
    assert one.stop.reason == "time_limit"


def test_a_limit_that_was_extended_meanwhile_counts(supervisor: Callable[[Queue], Supervisor]) -> None:
    queue, ranks = Queue(20), Asked()
    one = supervisor(queue)
    queue.seconds_left(3600)
    one._watch_clock(ranks)
    assert not ranks.asked


@pytest.mark.parametrize(
    ("granted", "left", "reason"),
    [(100, 100, "time_limit"), (100, 3600, None), (3600, 3600, "stop")],
    ids=["the limit is near", "it was extended", "somebody sent the signal by hand"],
)
def test_what_a_warning_means(
    supervisor: Callable[[Queue], Supervisor], granted: float, left: float, reason: str | None
) -> None:
    queue, ranks = Queue(granted), Asked()
    one = supervisor(queue)
    queue.seconds_left(left)
    one._hear_warning(ranks)
    assert ranks.asked is (reason is not None)
    assert (one.stop.reason if one.stop else None) == reason
