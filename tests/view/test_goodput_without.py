"""What a run's goodput would have been without its measures against faults, for run directories made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.rank_records import Progress, Save, Timing
from hpcaccel.core.records import to_dict
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.goodput_without import Without
from hpcaccel.view.report_table import print_report
from hpcaccel.view.time_report import TimeReport, report

from .conftest import HandMade


def measures(made: HandMade, **sections: dict[str, Any]) -> None:
    write_json(made.run.spec, {"version": 1, "spec": {"name": "gpt", **sections}})


def attempt(
    made: HandMade,
    number: int,
    steps: tuple[int, int],
    *,
    source: str | None = None,
    imports: float = 10.0,
    snapshots: float | None = None,
    end: str = "restart",
    **start: Any,
) -> None:
    """An attempt of 500 s with a second for each step after the first of ``steps``, up to the second."""
    began, (first, last) = 1000.0 * number, steps
    made.start(number, allocated_at=1000.0, **start)
    write_json(made.run.progress(number), to_dict(Progress(resumed_step=first, resumed_from=source)))
    ready = began + 5 + imports
    times = Timing(
        process_started=began + 5, imported=ready, formed=ready, prepared=ready, loaded=ready,
        first_step_time=ready + 1, resumed_step=first, last_step=last, last_step_time=ready + last - first,
        step_seconds=1.0, stall_seconds=snapshots or 0.0, snapshot_seconds=snapshots,
    )  # fmt: skip
    write_json(made.run.timing(number), to_dict(times))
    reason = {"restart": "failed", "requeue": "preempted", "end": "completed"}[end]
    made.end(number, reason=reason, decision=end, seconds=500.0, last_step=last, resumed_step=first)


def told(made: HandMade) -> TimeReport:
    return report(made.run, RunStatus(run_id="r", name="gpt", state="completed", attempts=3), now=9000.0)


def rows(made: HandMade) -> dict[str, Without]:
    return {row.measure: row for row in told(made).without}


def test_step_that_only_snapshots_kept_counts_once_although_two_attempts_continued_from_it(hand_made: HandMade) -> None:
    measures(hand_made, checkpoint={"snapshot_every_steps": 10})
    attempt(hand_made, 1, (0, 110))
    attempt(hand_made, 2, (100, 125), source="memory", checkpoint_step=50)
    attempt(hand_made, 3, (120, 200), source="memory", checkpoint_step=50, end="end")
    found = rows(hand_made)["snapshots"]
    assert found.training_lost_seconds == pytest.approx(70)  # 51 to 120, once
    assert "70 steps in no other checkpoint: 2 resumes from memory" in found.counted
    assert "their own cost is not known" in found.counted
    report = told(hand_made)
    assert report.goodput == pytest.approx(200 / report.held_seconds)
    assert found.goodput == pytest.approx(130 / report.held_seconds)
    assert found.ettr == pytest.approx(130 / report.total_seconds)


def test_snapshots_that_were_never_used_have_only_cost_time(hand_made: HandMade) -> None:
    measures(hand_made, checkpoint={"snapshot_every_steps": 10})
    attempt(hand_made, 1, (0, 100), snapshots=4.0, end="end")
    found, report = rows(hand_made)["snapshots"], told(hand_made)
    assert (found.training_lost_seconds, found.more_seconds) == (0.0, -4.0)
    assert found.counted == "no snapshot was used; snapshots blocked training for 4.00s"
    assert found.goodput == pytest.approx(report.seconds["training"] / (report.held_seconds - 4))
    assert (found.goodput or 0) > (report.goodput or 1)


def test_snapshot_written_at_a_stop_has_kept_the_steps_since_the_checkpoint_before(hand_made: HandMade) -> None:
    measures(hand_made, checkpoint={"snapshot_every_steps": 10})
    attempt(hand_made, 1, (0, 100), end="requeue")
    for step, source in ((30, False), (90, True)):
        save = Save(step=step, stall_seconds=0.0, seconds=1.0, bytes=1, from_memory=source)
        append_line(hand_made.run.saves(1), to_dict(save))
    attempt(hand_made, 2, (90, 150), source="step_00000090", checkpoint_step=90, end="end")
    found = rows(hand_made)["snapshots"]
    assert found.training_lost_seconds == pytest.approx(60)
    assert "60 steps in no other checkpoint: 1 snapshot written to the disk at a stop" in found.counted


def test_warm_restarts_are_compared_with_the_fastest_new_processes_of_the_run(hand_made: HandMade) -> None:
    measures(hand_made, resilience={"warm_restart": "auto"}, checkpoint={"snapshot_every_steps": 10})
    attempt(hand_made, 1, (0, 100), imports=30.0)
    attempt(hand_made, 2, (50, 100), imports=20.0, checkpoint_step=50)
    attempt(hand_made, 3, (100, 200), imports=2.0, warm=True, source="memory", checkpoint_step=50, end="end")
    found = rows(hand_made)
    warm, report = found["warm restarts"], told(hand_made)
    assert warm.more_seconds == pytest.approx(18)
    assert warm.goodput == pytest.approx(200 / (report.held_seconds + 18))
    assert warm.counted.startswith("1 attempt began by fork, with 2.00s of imports; 20.0s is the shortest")
    both = found["snapshots and warm restarts"]
    assert both.goodput == pytest.approx(150 / (report.held_seconds + 18))
    attempt(hand_made, 4, (200, 201), imports=1.0, end="end")  # a later attempt with new processes is the fastest
    assert rows(hand_made)["warm restarts"].more_seconds == pytest.approx(-1)


def test_warm_restarts_without_new_processes_to_compare_with_are_not_known(hand_made: HandMade) -> None:
    measures(hand_made, resilience={"warm_restart": "auto"})
    attempt(hand_made, 1, (0, 100), end="end")
    assert rows(hand_made) == {}
    hand_made.run.ledger.unlink()
    attempt(hand_made, 2, (100, 200), warm=True, end="end")
    assert rows(hand_made)["warm restarts"].goodput is None


def test_time_in_the_queue_that_other_nodes_saved_is_not_known(
    hand_made: HandMade, capsys: pytest.CaptureFixture[str]
) -> None:
    measures(hand_made, resilience={"spare_nodes": 1, "on_node_loss": "shrink"})
    attempt(hand_made, 1, (0, 100), nodes=["n1", "n2"])
    attempt(hand_made, 2, (50, 100), nodes=["n1", "n3"], checkpoint_step=50)
    attempt(hand_made, 3, (100, 200), nodes=["n1"], checkpoint_step=100, end="requeue")
    attempt(hand_made, 4, (200, 300), nodes=["n4", "n5"], checkpoint_step=200, end="end")
    found = rows(hand_made)
    assert found["spare nodes"].counted == "1 restart in the same job without n2"
    assert found["fewer nodes"].counted == "1 restart in the same job without n3; 8m 20s on fewer than 2 nodes"
    assert [(row.goodput, row.ettr) for row in found.values()] == [(None, None)] * 2
    print_report(told(hand_made))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("spare nodes")]
    assert line.count("not known") == 2
    assert "the time in the queue" in line


def test_report_without_such_measures_has_no_such_table(
    hand_made: HandMade, capsys: pytest.CaptureFixture[str]
) -> None:
    measures(hand_made, resilience={"warm_restart": "off", "spare_nodes": 0, "on_node_loss": "requeue"})
    attempt(hand_made, 1, (0, 100), end="end")
    assert json.loads(json.dumps(told(hand_made).to_json()))["without"] == []
    print_report(told(hand_made))
    assert "WITHOUT" not in capsys.readouterr().out
