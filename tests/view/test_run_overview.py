"""Tests of the overview of a run, its summary and status, and the table of runs."""

from __future__ import annotations

import io
import json

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.submission.runs.attempts import read_attempts
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.run_overview import overview
from hpcaccel.view.run_tables import print_runs, print_status, summary
from hpcaccel.view.time_report import report


def status_of(hand_made, state="completed", **facts):
    facts.setdefault("attempts", len(read_attempts(hand_made.run)))
    return RunStatus(run_id=hand_made.run.run_id, name="gpt", state=state, **facts)


@pytest.fixture
def came_back(hand_made):
    """A run that was stopped at step 120 of 400, requeued, and completed."""
    hand_made.start(1)
    hand_made.progress(1)
    for step in (1, 60, 120):
        hand_made.metric(step, attempt=1, loss=6.0 - step / 100)
    hand_made.end(1, reason="stop", decision="requeue", last_step=120, seconds=65.0)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=120)
    for step in (180, 400):
        hand_made.metric(step, attempt=2, loss=6.0 - step / 100)
    hand_made.end(2, last_step=400, resumed_step=120, seconds=200.0)
    checkpoint = hand_made.run.checkpoints / "step_00000400"
    checkpoint.mkdir()
    (checkpoint / "COMMITTED").write_text("{}")
    return hand_made


def test_overview_has_state_steps_losses_and_checkpoint(came_back):
    run = overview(came_back.run, status_of(came_back))

    assert (run.name, run.job_id, run.state) == ("gpt", "local-1", "completed")
    assert (run.attempts, run.step, run.total_steps, run.steps_lost) == (2, 400, 400, 0)
    assert (run.first_loss, run.last_loss) == (5.99, 2.0)
    assert (run.checkpoint, run.checkpoint_step) == ("step_00000400", 400)


def test_slow_ranks_are_shown_while_they_are_slow(came_back):
    slow = {"rank": 5, "node": "n2", "ratio": 2.1}
    append_line(came_back.run.stragglers(1), {"step": 100, "slow": [slow, slow]})
    assert overview(came_back.run, status_of(came_back)).slow_ranks == []
    append_line(came_back.run.stragglers(2), {"step": 200, "slow": [slow]})
    now = overview(came_back.run, status_of(came_back, state="running"))
    text = io.StringIO()
    print_status(now, stream=text)
    slowness = "takes 2.1 times as long as the median rank for its own part of a step"
    assert f"slow ranks  rank 5 on n2 ({slowness})" in text.getvalue()
    assert now.to_json()["slow_ranks"] == [slow]
    append_line(came_back.run.stragglers(2), {"step": 300, "slow": []})
    assert overview(came_back.run, status_of(came_back)).slow_ranks == []


def test_overview_with_nan_loss_becomes_valid_json(came_back):
    came_back.metric(401, attempt=2, loss=float("nan"))
    plain = overview(came_back.run, status_of(came_back)).to_json()

    again = json.loads(json.dumps(plain, allow_nan=False))
    assert again["last_loss"] is None
    assert again["history"][0]["end"]["reason"] == "stop"


def test_summary_of_completed_run(came_back):
    said = summary(overview(came_back.run, status_of(came_back)))

    assert said.splitlines() == [
        f"gpt {came_back.run.run_id}: completed",
        "  attempts: 2",
        "  steps: 400/400",
        "  steps lost: 0",
        "  loss: first 5.99, last 2",
        "  checkpoint: step_00000400",
        f"  run directory: {came_back.run.path}",
    ]


def test_summary_of_failed_run_has_reason_and_advice(hand_made):
    hand_made.start(1)
    hand_made.end(1, reason="failed", error_class="oom", detail="rank 0 ran out of memory", advice="Take less.")
    failed = overview(hand_made.run, status_of(hand_made, "failed", reason="failed"))

    assert "  reason: attempt 1 failed (oom): rank 0 ran out of memory\n  advice: Take less.\n" in summary(failed)
    out = io.StringIO()
    print_status(failed, stream=out)
    print_runs([failed], stream=out)
    assert "failed (oom)" in out.getvalue()
    assert "failed (oom)" in out.getvalue().splitlines()[-1]
    assert "advice      Take less.\n" in "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_advice_is_shown_for_impossible_dependency_but_not_for_cancel(hand_made):
    hand_made.start(1)
    hand_made.end(1, reason="cancelled", error_class="dependency", detail="afterok: run x failed", advice="Resume x.")
    never = overview(hand_made.run, status_of(hand_made, "cancelled"))
    assert (never.error_class, never.advice) == ("dependency", "Resume x.")
    assert "(dependency): afterok: run x failed\n  advice: Resume x.\n" in summary(never)
    hand_made.start(2)
    hand_made.end(2, reason="cancelled")
    assert overview(hand_made.run, status_of(hand_made, "cancelled")).advice == ""


def test_run_that_continued_after_a_failure_has_no_advice(hand_made):
    hand_made.start(1)
    hand_made.end(1, reason="failed", error_class="oom", advice="Take less.", decision="restart")
    assert overview(hand_made.run, status_of(hand_made, "running")).advice == ""


def test_summary_of_run_that_never_started_has_slurms_state_as_reason(hand_made):
    said = summary(overview(hand_made.run, status_of(hand_made, "cancelled", detail="Slurm says CANCELLED")))
    assert "  reason: Slurm says CANCELLED\n" in said
    assert "steps" not in said


def test_run_table_has_one_row_per_run(came_back):
    out = io.StringIO()
    print_runs([overview(came_back.run, status_of(came_back))], stream=out)
    head, row = out.getvalue().splitlines()

    assert head.split() == ["RUN", "NAME", "JOB", "STATE", "ATTEMPTS", "STEP", "LOSS", "CREATED"]
    assert row.split()[:7] == [came_back.run.run_id, "gpt", "local-1", "completed", "2", "400/400", "2"]


def test_status_shows_stops_and_path_and_escapes_detail(came_back):
    out = io.StringIO()
    print_status(overview(came_back.run, status_of(came_back, "running", detail="[b]x[/b]\x07")), stream=out)
    text = out.getvalue()

    assert "[b]x[/b]\\x07" in text
    assert "stopped on request at step 120; requeued" in text
    assert str(came_back.run.path) in text


def test_status_reports_metric_lines_that_were_skipped(came_back):
    with came_back.run.foreign_metrics(2).open("w") as file:
        file.write('loss 0.5\n{"step": 401, "acc": NaN}\n')
    run = overview(came_back.run, status_of(came_back))
    out = io.StringIO()
    print_status(run, stream=out)
    said = " ".join(out.getvalue().split())
    where = came_back.run.foreign_metrics(2)
    assert f"metrics 1 line was skipped: line 1 of {where}: not JSON: 'loss 0.5'" in said
    assert run.step == 401
    assert json.loads(json.dumps(run.to_json(), allow_nan=False))["values"] == {"loss": 2.0, "acc": None}


def test_pruned_trial_has_exit_code_zero(hand_made):
    hand_made.start(1)
    hand_made.end(1, reason="pruned", detail="at step 20", last_step=20)
    pruned = overview(hand_made.run, status_of(hand_made, "pruned", reason="pruned"))
    assert "pruned\n  reason: attempt 1 pruned: at step 20\n" in summary(pruned)
    assert status_of(hand_made, "pruned").exit_code == 0


def test_resumed_step_is_read_from_timing_without_progress_file(hand_made):
    """With ``resume()`` alone there is no progress.json, only rank 0's timing."""
    hand_made.start(1)
    write_json(hand_made.run.timing(1), {"loaded": 1.0, "first_step_time": 2.0, "last_step": 10})
    hand_made.end(1, reason="stop", decision="requeue", last_step=10, checkpoint_step=10)
    hand_made.start(2)
    write_json(hand_made.run.timing(2), {"loaded": 1.0, "first_step_time": 2.0, "resumed_step": 10, "last_step": 30})
    hand_made.end(2, last_step=30, resumed_step=0)  # as earlier releases wrote it
    run = overview(hand_made.run, status_of(hand_made))
    assert (run.steps_lost, [attempt.resumed_step for attempt in run.history]) == (0, [0, 10])
    spent = report(hand_made.run, status_of(hand_made))
    assert (spent.steps, spent.steps_lost) == (30, 0)


def test_attempt_preempted_before_its_first_step_loses_no_step(hand_made):
    hand_made.start(1)
    hand_made.progress(1)
    hand_made.end(1, reason="preempted", decision="requeue", last_step=5, checkpoint_step=5, resumed_step=0)
    hand_made.start(2)
    write_json(hand_made.run.timing(2), {"formed": 1.0, "prepared": 1.0})
    write_json(hand_made.run.outcome(2), {"reason": "preempted", "step": 5, "resume": True})
    hand_made.end(2, reason="preempted", decision="requeue", last_step=5, checkpoint_step=5, resumed_step=0)
    hand_made.start(3)
    hand_made.progress(3, resumed_step=5)
    run = overview(hand_made.run, status_of(hand_made, state="running"))
    assert (run.steps_lost, run.step) == (0, 5)
    assert [attempt.resumed_step for attempt in run.history] == [0, 5, 5]
