"""Tests of the attempts of a run, as read from its ledger, and of the steps that it lost."""

from __future__ import annotations

from hpcaccel.core.durable_files import append_line
from hpcaccel.submission.runs.attempts import Metrics, count, read_attempts


def steps_lost(attempts):
    return sum(one.lost for one in count(attempts, goes_on=True))


def test_a_run_that_never_started_has_no_attempts(hand_made):
    assert read_attempts(hand_made.run) == []
    assert steps_lost([]) == 0


def test_attempts_are_read_in_order_with_resumed_step_and_end(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="stop", decision="requeue", last_step=120)
    hand_made.start(2)

    first, second = read_attempts(hand_made.run)

    assert (first.number, first.resumed_step, first.end.last_step) == (1, 0, 120)
    assert (second.number, second.resumed_step, second.end) == (2, None, None)


def test_no_step_is_lost_if_next_attempt_resumes_at_last_step(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="stop", decision="requeue", last_step=120)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=120)

    assert steps_lost(read_attempts(hand_made.run)) == 0


def test_steps_after_the_last_checkpoint_are_lost(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="failed", decision="restart", last_step=117)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=100)
    hand_made.end(2, reason="failed", decision="restart", last_step=103, resumed_step=100)
    hand_made.start(3)
    hand_made.progress(3, resumed_step=100)

    assert steps_lost(read_attempts(hand_made.run)) == 17 + 3


def test_lost_steps_are_counted_from_metrics_if_not_in_ledger(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="lost", decision="requeue", last_step=None)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=100)
    hand_made.metric(110, attempt=1)
    metrics = Metrics(hand_made.run)
    metrics.read()

    assert steps_lost(read_attempts(hand_made.run, metrics.logged)) == 10


def test_attempt_preempted_during_start_up_loses_no_step(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="stop", decision="requeue", last_step=50)
    hand_made.start(2)  # preempted during start-up: no progress, no steps
    hand_made.end(2, reason="preempted", decision="requeue", resumed_step=0)
    hand_made.start(3)
    hand_made.progress(3, resumed_step=50)

    assert steps_lost(read_attempts(hand_made.run)) == 0


def test_ledger_lines_and_fields_of_later_versions_are_ignored(hand_made):
    append_line(hand_made.run.ledger, {"event": "moved", "attempt": 1})
    hand_made.start(1)
    append_line(
        hand_made.run.ledger,
        {"event": "end", "attempt": 1, "time": 1.0, "reason": "completed", "decision": "end", "colour": "red"},
    )

    (attempt,) = read_attempts(hand_made.run)
    assert attempt.end.reason == "completed"
