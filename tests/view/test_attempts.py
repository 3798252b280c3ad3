"""The attempts of a run and the steps that it lost."""

from __future__ import annotations

from hpcaccel.core.durable_files import append_line
from hpcaccel.view.attempts import Metrics, count, read_attempts


def steps_lost(attempts):
    return sum(one.lost for one in count(attempts, goes_on=True))


def test_a_run_that_never_started_has_no_attempts(hand_made):
    assert read_attempts(hand_made.run) == []
    assert steps_lost([]) == 0


def test_attempts_come_in_order_with_what_is_known_of_each(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="stop", decision="requeue", last_step=120)
    hand_made.start(2)

    first, second = read_attempts(hand_made.run)

    assert (first.number, first.resumed_step, first.end.last_step) == (1, 0, 120)
    assert (second.number, second.resumed_step, second.end) == (2, None, None)


def test_nothing_is_lost_when_the_next_attempt_goes_on_where_the_last_one_stopped(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="stop", decision="requeue", last_step=120)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=120)

    assert steps_lost(read_attempts(hand_made.run)) == 0


def test_steps_behind_the_last_checkpoint_are_lost(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="failed", decision="restart", last_step=117)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=100)
    hand_made.end(2, reason="failed", decision="restart", last_step=103, resumed_step=100)
    hand_made.start(3)
    hand_made.progress(3, resumed_step=100)

    assert steps_lost(read_attempts(hand_made.run)) == 17 + 3


def test_the_metrics_know_of_steps_that_the_ledger_does_not(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="lost", decision="requeue", last_step=None)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=100)
    hand_made.metric(110, attempt=1)
    metrics = Metrics(hand_made.run)
    metrics.read()

    assert steps_lost(read_attempts(hand_made.run, metrics.logged)) == 10


def test_an_attempt_that_never_reached_its_loop_loses_nothing(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="stop", decision="requeue", last_step=50)
    hand_made.start(2)  # preempted during start-up: no progress, no steps
    hand_made.end(2, reason="preempted", decision="requeue", resumed_step=0)
    hand_made.start(3)
    hand_made.progress(3, resumed_step=50)

    assert steps_lost(read_attempts(hand_made.run)) == 0


def test_lines_of_a_later_version_are_passed_over(hand_made):
    append_line(hand_made.run.ledger, {"event": "moved", "attempt": 1})
    hand_made.start(1)
    append_line(
        hand_made.run.ledger,
        {"event": "end", "attempt": 1, "time": 1.0, "reason": "completed", "decision": "end", "colour": "red"},
    )

    (attempt,) = read_attempts(hand_made.run)
    assert attempt.end.reason == "completed"
