"""Tests of the live display of one run."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.records import to_dict
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.submission.runs.progress_display import PlainDisplay, display, follow
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.submission.runs.watch import BackgroundQuery, Watcher, facts

RUNNING = RunStatus(run_id="r", name="gpt", state="running")
COMPLETED = replace(RUNNING, state="completed", reason="completed")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def watcher(hand_made, *answers, clock=None, queue_seconds=10.0):
    """A watcher whose status query returns ``answers`` in order, then always the last one."""
    asked = []

    def status():
        asked.append(answers[min(len(asked), len(answers) - 1)])
        return asked[-1]

    made = Watcher(hand_made.run, BackgroundQuery(status, seconds=queue_seconds, clock=clock or Clock()))
    made.asked = asked  # type: ignore[attr-defined]
    return made


def test_snapshot_has_attempt_step_values_and_time_left(hand_made):
    hand_made.start(1)
    hand_made.progress(1, total_steps=400)
    hand_made.metric(1, attempt=1, time=10.0, loss=5.5)
    hand_made.metric(101, attempt=1, time=20.0, loss=2.41349, tokens_per_second=12345.0)

    snapshot = watcher(hand_made, RUNNING).look()

    assert (snapshot.attempt, snapshot.step, snapshot.total_steps) == (1, 101, 400)
    assert snapshot.seconds_left == pytest.approx(29.9)
    assert facts(snapshot) == ["step 101/400", "loss 2.413", "12.3k tokens/s", "30s left"]


def test_step_of_attempt_without_metrics_is_its_resumed_step(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.metric(150, attempt=1)
    hand_made.end(1, reason="failed", decision="restart", last_step=150)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=120)

    snapshot = watcher(hand_made, RUNNING).look()
    assert snapshot.step == 120


def test_status_is_queried_once_per_interval(hand_made, clock):
    watching = watcher(hand_made, RUNNING, clock=clock)
    for clock.now in (0.0, 1.0, 5.0, 9.9):
        watching.look()
    assert len(watching.asked) == 1
    clock.now = 10.0
    watching.look()
    assert len(watching.asked) == 2


def test_new_ledger_line_triggers_a_status_query(hand_made, clock):
    watching = watcher(hand_made, RUNNING, COMPLETED, clock=clock)
    hand_made.start(1)
    assert watching.look().status.state == "running"
    hand_made.end(1)
    assert watching.look().status.state == "completed"


def test_follow_returns_when_the_run_ends(hand_made):
    shown = []

    class Keep:
        def show(self, snapshot):
            shown.append(snapshot.status.state)

    watching = watcher(hand_made, RUNNING, RUNNING, COMPLETED, queue_seconds=0.0)
    last = follow(watching, Keep(), sleep=lambda _: None)

    assert last.status.state == "completed"
    assert shown == ["running", "running", "completed"]


def test_plain_display_prints_events_and_at_intervals_the_step(hand_made, clock):
    out = io.StringIO()
    plain = PlainDisplay(out, clock=clock)
    pending = replace(RUNNING, state="pending", detail="Priority")
    requeued = replace(RUNNING, state="requeued")
    watching = watcher(hand_made, pending, RUNNING, requeued, RUNNING, COMPLETED, clock=clock)

    plain.show(watching.look())
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.metric(1, attempt=1, loss=5.5)
    plain.show(watching.look())
    hand_made.metric(2, attempt=1, loss=5.4)
    clock.now = 1.0
    plain.show(watching.look())  # too soon for another line
    clock.now = 6.0
    plain.show(watching.look())
    write_json(hand_made.run.control / "stop-1.json", to_dict(StopRequest(reason="stop", then="requeue", time=1.0)))
    hand_made.end(1, reason="stop", decision="requeue", detail="stopped at step 2, saved step_00000002")
    plain.show(watching.look())
    hand_made.start(2)
    hand_made.progress(2, resumed_step=2)
    plain.show(watching.look())
    hand_made.metric(3, attempt=2, loss=5.3)
    hand_made.end(2)
    plain.show(watching.look())

    assert out.getvalue().splitlines() == [
        "pending: Priority",
        "attempt 1 started: 2 ranks on n1",
        "step 1/400  loss 5.5",
        "step 2/400  loss 5.4  6m 38s left",
        "stop requested: hpcaccel stop --requeue",
        "attempt 1 stopped on request: stopped at step 2, saved step_00000002; requeued",
        "requeued",
        "attempt 2 started: 2 ranks on n1",
        "attempt 2 resumed from step 2",
        "step 3/400  loss 5.3",
        "attempt 2 completed",
        "completed",
    ]


def test_events_before_the_first_look_are_printed_oldest_first(hand_made):
    """``hpcaccel wait`` on a run that was stopped twice before."""
    for number in (1, 2):
        hand_made.start(number)
        request = StopRequest(reason="stop", then="requeue", time=1000.0 * number + 500)
        write_json(hand_made.run.control / f"stop-{number}.json", to_dict(request))
        hand_made.end(number, time=1000.0 * number + 600, reason="stop", decision="requeue")
    hand_made.start(3)
    out = io.StringIO()

    PlainDisplay(out, clock=Clock()).show(watcher(hand_made, COMPLETED).look())

    assert [line.split(":")[0] for line in out.getvalue().splitlines()] == [
        "attempt 1 started",
        "stop requested",
        "attempt 1 stopped on request; requeued",
        "attempt 2 started",
        "stop requested",
        "attempt 2 stopped on request; requeued",
        "attempt 3 started",
        "completed",
    ]


def test_plain_display_is_used_without_a_terminal():
    with display(stream=io.StringIO()) as chosen:
        assert isinstance(chosen, PlainDisplay)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_display_has_a_bar_and_escapes_names(hand_made, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.metric(200, attempt=1, **{"loss": 2.5, "[red]odd[/red]\x1b[2J": 1.0})
    out = Terminal()
    with display(stream=out) as live:
        live.show(watcher(hand_made, replace(RUNNING, detail="[bold]why[/bold]")).look())
    text = out.getvalue()

    assert "━" in text
    assert "200/400" in text
    assert "[red]odd[/red]\\x1b[2J" in text
    assert "[bold]why[/bold]" in text
    assert "\x1b[2J" not in text
