"""First and last step of attempts, and how many of their steps were kept or lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.checkpoint_files import MANIFEST, checkpoint_name
from hpcaccel.core.attempt_steps import AttemptSteps, LoggedSteps, complete_timing, count_steps, read_steps
from hpcaccel.core.durable_files import append_line, read_json, write_json
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.rank_records import Beat, Outcome, Progress, Timing
from hpcaccel.core.records import AttemptEnd, AttemptStart, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.step_counter import FORMAT, read_counter
from hpcaccel.node.ledger import Ledger, how_far


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "gpt" / "20261120-153012-4f2a")
    run.create()
    run.attempt(1).mkdir()
    return run


def found(run: RunDir, **end: Any) -> tuple[int | None, int | None]:
    line = AttemptEnd(attempt=1, time=1.0, reason="failed", decision="end", **end) if end else None
    steps = read_steps(run, 1, LoggedSteps.of(Logged(run).read()).get(1), end=line)
    return steps.from_step, steps.last_step


def times(run: RunDir, **facts: Any) -> None:
    write_json(run.timing(1), to_dict(Timing(**facts)))


def counted(run: RunDir, step: int, when: float) -> None:
    run.step_counter(1).write_bytes(FORMAT.pack(step, when, step, when))


def test_timing_of_a_killed_attempt_is_completed_from_the_step_counter(run: RunDir) -> None:
    times(run, loaded=10.0, resumed_step=180, first_step_time=11.0, last_step=190, last_step_time=20.0, saves=3)
    counted(run, 199, 24.5)
    complete_timing(run, 1)
    timing = read_json(run.timing(1))
    assert timing is not None
    assert (timing["last_step"], timing["last_step_time"], timing["saves"]) == (199, 24.5, 3)
    run.step_counter(1).unlink()
    complete_timing(run, 1)
    assert read_json(run.timing(1)) == timing


def test_attempt_without_progress_record_began_at_its_loaded_step(run: RunDir) -> None:
    times(run, loaded=10.0, resumed_step=180, first_step_time=11.0, last_step=190, last_step_time=20.0)
    assert found(run) == (180, 190)


def test_attempt_that_loaded_nothing_began_at_step_0(run: RunDir) -> None:
    times(run, first_step_time=11.0, last_step=190, last_step_time=20.0)
    assert found(run) == (0, 190)


def test_last_step_of_a_killed_rank_is_read_from_the_step_counter(run: RunDir) -> None:
    write_json(run.progress(1), to_dict(Progress(resumed_step=0)))
    times(run, loaded=10.0, first_step_time=11.0, last_step=128, last_step_time=20.0)
    counted(run, 199, 27.5)
    assert found(run) == (0, 199)
    assert read_steps(run, 1).last_time == 27.5


def test_half_written_step_counter_is_ignored(run: RunDir) -> None:
    when = 1795357046.314375
    counted(run, 199, when)
    assert read_counter(run, 1) == (199, when)
    torn = [(299, when, 199, when), (299, when + 1, 199, when), (299, when + 1, 299, when)]
    for data in (*(FORMAT.pack(*values) for values in torn), bytes(FORMAT.size), bytes(20), b""):
        run.step_counter(1).write_bytes(data)
        assert read_counter(run, 1) is None, data


def test_mapped_step_counter_has_one_copy(run: RunDir) -> None:
    run.step_counter(1).write_bytes(FORMAT.pack(200, 50.0, 0, 0.0))
    assert read_counter(run, 1) == (200, 50.0)


def test_last_step_comes_from_the_heartbeat_without_a_step_counter(run: RunDir) -> None:
    times(run, first_step_time=11.0, last_step=10, last_step_time=20.0, step_seconds=1.0)
    run.heartbeats(1).mkdir()
    beat = Beat(rank=0, host="n1", pid=1, number=3, time=100.0, interval_seconds=10.0, phase="training", step=15)
    write_json(run.heartbeats(1) / "0.json", to_dict(beat))
    assert (found(run), read_steps(run, 1).last_time) == ((0, 15), 25.0)


def test_attempt_stopped_before_its_first_step_has_done_no_step(run: RunDir) -> None:
    times(run, formed=5.0)
    write_json(run.outcome(1), to_dict(Outcome(reason="preempted", step=5, resume=True)))
    assert found(run) == (5, 5)


def test_first_step_of_a_foreign_program_is_unknown(run: RunDir) -> None:
    for step in (120, 160, 140):
        append_line(run.foreign_metrics(1), {"step": step, "loss": 1.0})
    assert found(run) == (None, 160)
    assert how_far(run, 1, ends=[])["first_logged"] == 120


@pytest.mark.parametrize(
    ("steps", "outcome", "told"),
    [
        ([None, None, None], None, (1, 3)),
        ([None, None, None], 28, (None, 28)),  # the lines are numbered from 1 in each attempt
        ([None, None, None], 2, (None, 2)),
        ([21, 22, None], 28, (21, 28)),
        ([None, 21, 22], 28, (21, 28)),
    ],
)
def test_outcome_takes_precedence_over_metric_lines_without_a_step(
    run: RunDir, steps: list[int | None], outcome: int | None, told: tuple[int | None, int]
) -> None:
    for step in steps:
        append_line(run.foreign_metrics(1), {"loss": 1.0} if step is None else {"step": step, "loss": 1.0})
    if outcome is not None:
        write_json(run.outcome(1), to_dict(Outcome(reason="time_limit", step=outcome, resume=True)))
    line = how_far(run, 1, ends=[])
    assert (line["first_logged"], line["last_step"]) == told


def test_steps_come_from_the_ledger_if_no_file_has_them(run: RunDir) -> None:
    assert found(run, resumed_step=10, last_step=40) == (10, 40)
    assert found(run, resumed_step=0) == (None, None)


def test_damaged_step_files_are_ignored(run: RunDir) -> None:
    run.timing(1).write_text("{")
    run.step_counter(1).write_text("")
    write_json(run.progress(1), to_dict(Progress(resumed_step=7)))
    assert found(run) == (7, None)


@pytest.mark.parametrize(
    ("named", "told"),
    [(None, ("step_00000020", 20)), ("step_00000020", ("step_00000020", 20)), ("checkpoint-28", ("checkpoint-28", 28))],
)
def test_checkpoint_of_the_outcome_takes_precedence_over_the_newest(
    run: RunDir, named: str | None, told: tuple[str, int]
) -> None:
    ours = run.checkpoints / checkpoint_name(20)
    ours.mkdir()
    (ours / MANIFEST).write_text("{}")
    write_json(run.outcome(1), to_dict(Outcome(reason="time_limit", step=28, checkpoint=named, resume=True)))
    line = how_far(run, 1, ends=[])
    assert (line["checkpoint"], line["checkpoint_step"]) == told


def test_ledger_line_of_a_lost_attempt_has_its_steps(run: RunDir) -> None:
    ledger = Ledger.of(run)
    ledger.start(AttemptStart(attempt=1, time=1.0, job_id="45"))
    times(run, loaded=10.0, resumed_step=180, first_step_time=11.0, last_step=181, last_step_time=12.0)
    counted(run, 199, 27.5)
    line = ledger.close_lost(run)
    assert line is not None
    assert (line.resumed_step, line.last_step) == (180, 199)


# -- kept and lost steps -----------------------------------------------------------------------------------------------


def one(
    first: int | None, last: int | None, reason: str | None = "failed", *, saved: int | None = 25
) -> tuple[AttemptStart, AttemptEnd | None, AttemptSteps]:
    end = AttemptEnd(attempt=1, time=1.0, reason=reason, decision="end", checkpoint_step=saved) if reason else None  # type: ignore[arg-type]
    return AttemptStart(attempt=1, time=0.0, job_id="1"), end, AttemptSteps(from_step=first, last_step=last)


def lost(*attempts: Any, goes_on: bool = False, **known: Any) -> list[int]:
    return [count.lost for count in count_steps(attempts, goes_on=goes_on, **known)]


def test_steps_are_kept_up_to_the_start_of_a_later_attempt() -> None:
    first, second, third = one(0, 30), one(20, 30), one(12, 30)
    assert [count.kept_until for count in count_steps([first, second, third], goes_on=False)] == [12, 12, 25]
    assert lost(first, second, third) == [18, 10, 5]
    assert lost(first, second, one(12, 30, "completed")) == [18, 10, 0]


def test_attempt_without_steps_does_not_change_the_lost_steps() -> None:
    assert lost(one(0, 30), one(None, None)) == [5, 0]
    assert (
        lost(one(0, 5, "preempted", saved=5), one(5, 5, "preempted", saved=5), one(5, 9, None), goes_on=True) == [0] * 3
    )


def test_running_attempt_has_lost_nothing_and_supersedes_earlier_steps() -> None:
    assert lost(one(0, 199, saved=180), one(180, None, None), goes_on=True) == [19, 0]
    assert lost(one(180, 199, None), goes_on=True) == [0]


def test_attempt_without_an_end_keeps_steps_up_to_the_newest_checkpoint() -> None:
    assert lost(one(0, 40, None), newest_checkpoint=30) == [10]


def test_lost_steps_of_a_foreign_program_are_zero() -> None:
    assert lost(one(None, 100, "time_limit", saved=None), one(None, 230, "time_limit", saved=None)) == [0, 0]
