"""Tests of the list of runs: a run that has ended is read once, and again only after a change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.run_dir import state_home
from hpcaccel.submission.runs import run_index
from hpcaccel.view import kept_readings, run_overview
from hpcaccel.view.run_overview import listed
from tests.view.conftest import HandMade


@pytest.fixture(autouse=True)
def at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(run_index, "SETTLING_SECONDS", -1.0)


def over(path: Path) -> HandMade:
    made = HandMade(path)
    made.start(1)
    made.progress(1)
    made.metric(120, attempt=1, loss=float("nan"))
    made.end(1, last_step=400)
    return made


@pytest.fixture
def runs(tmp_path):
    return [over(tmp_path / "runs" / "gpt" / f"20261120-15301{number}-4f2a") for number in range(3)]


def test_ended_run_is_read_once(runs, monkeypatch):
    first = listed([made.run for made in runs])
    assert [(one.state, one.step, one.attempts) for one in first] == [("completed", 400, 1)] * 3
    assert first[0].to_json()["history"][0]["end"]["reason"] == "completed"
    monkeypatch.setattr(run_overview, "overview", lambda run, now: pytest.fail("read"))
    again = listed([made.run for made in runs])
    assert [one.to_json() for one in again] == [one.to_json() for one in first]
    assert str(again[0].last_loss) == "nan"
    assert json.dumps([one.to_json() for one in again], allow_nan=False)


def test_run_that_has_not_ended_is_read_each_time(runs, monkeypatch):
    runs[1].start(2)
    listed([made.run for made in runs])
    asked = []
    monkeypatch.setattr(
        run_overview, "overview", lambda run, now, real=run_overview.overview: asked.append(run) or real(run, now)
    )
    assert listed([made.run for made in runs])[1].state != "completed"
    assert asked == [runs[1].run]


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("another attempt has ended", ("completed", 2, 500)),
        ("an attempt has begun", ("lost", 2, 400)),
        ("a program of its own logs late", ("completed", 1, 600)),
        ("the metrics grew", ("completed", 1, 700)),
    ],
)
def test_run_changed_by_another_process_is_read_again(runs, how, shown):
    made = runs[0]
    listed([one.run for one in runs])
    if how == "another attempt has ended":
        made.start(2)
        made.end(2, last_step=500)
    elif how == "an attempt has begun":
        made.start(2)
    elif how == "a program of its own logs late":
        append_line(made.run.foreign_metrics(1), {"step": 600, "loss": 1.0})
    else:
        made.metric(700, attempt=1, loss=1.0)
    now = listed([one.run for one in runs])[0]
    assert (now.state, now.attempts, now.step) == shown


def test_run_replaced_by_another_at_the_same_path_is_read_again(runs, tmp_path):
    first, second = runs[0], runs[1]
    second.metric(900, attempt=1, loss=1.0)
    before = listed([made.run for made in runs])
    first.run.path.rename(tmp_path / "aside")
    second.run.path.rename(first.run.path)
    (now,) = listed([first.run])
    assert (before[0].step, now.step) == (400, 900)


def test_deleted_run_is_removed_from_the_index(runs, monkeypatch):
    monkeypatch.setattr(run_index, "_SPARE_LINES", 0)
    listed([made.run for made in runs])
    shutil.rmtree(runs[2].run.path)
    for step in range(1, 9):
        runs[0].metric(1000 + step, attempt=1, loss=1.0)
        listed([made.run for made in runs[:2]])
    (file,) = state_home().rglob("list.jsonl")
    assert str(runs[2].run.path) not in file.read_text()


def test_patient_listing_keeps_rows_in_memory(runs, monkeypatch):
    first = listed([made.run for made in runs], patient=True)
    monkeypatch.setattr(run_overview, "overview", lambda run, now: pytest.fail("read"))
    monkeypatch.setattr(run_overview, "CachedOverview", lambda purpose, only: pytest.fail("cache file read"))

    again = listed([made.run for made in runs], patient=True)
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_page_parses_only_the_lines_of_its_runs(runs, monkeypatch):
    expected = listed([made.run for made in runs])
    monkeypatch.setattr(run_overview, "_KEPT_ROWS", kept_readings.KeptRows())
    monkeypatch.setattr(run_overview, "overview", lambda run, now: pytest.fail("read"))
    assert listed([runs[1].run], patient=True) == expected[1:2]
    cached = run_index.CachedOverview("list", only=[runs[1].run.path])
    assert cached.recall(runs[1].run.path) is not None
    assert cached.recall(runs[0].run.path) is None


def test_patient_listing_notices_a_resume_at_once(runs):
    listed([made.run for made in runs], patient=True)
    record = runs[1].run.record
    record.rename(record.with_suffix(".old"))
    shutil.copy(record.with_suffix(".old"), record)
    append_line(runs[1].run.ledger, json.loads(runs[1].run.ledger.read_text().splitlines()[0]) | {"attempt": 2})
    runs[1].run.attempt(2).mkdir()

    states = [one.state for one in listed([made.run for made in runs], patient=True)]
    assert (states[0], states[2]) == ("completed", "completed")
    assert states[1] != "completed"


def test_patient_listing_checks_old_rows_in_turn(runs, monkeypatch):
    listed([made.run for made in runs], patient=True)
    monkeypatch.setattr(kept_readings, "CHECK_SECONDS", -1.0)
    monkeypatch.setattr(kept_readings, "LEAST_CHECKS", 1)
    read = []
    monkeypatch.setattr(
        run_overview, "overview", lambda run, now, real=run_overview.overview: read.append(run) or real(run, now)
    )
    listed([made.run for made in runs], patient=True)
    assert len(read) == 1


def test_rows_leave_out_long_fields(runs):
    plain = listed([runs[0].run])[0].to_json()
    assert "life" not in plain
    assert plain["at_risk"] is None


def test_ended_array_is_kept_in_memory_until_it_is_resumed(tmp_path, monkeypatch):
    array = HandMade(tmp_path / "runs" / "grid" / "20261120-153012-4f2a")
    record = json.loads(array.run.record.read_text())
    array.run.record.write_text(json.dumps({**record, "array_size": 2}))
    array.run.tasks.mkdir()
    tasks = [over(array.run.task(index).path) for index in range(2)]
    assert [one.state for one in listed([array.run], patient=True)] == ["completed"]
    real = run_overview.overview
    monkeypatch.setattr(run_overview, "overview", lambda run, now: pytest.fail("read"))
    assert [one.state for one in listed([array.run], patient=True)] == ["completed"]
    monkeypatch.setattr(run_overview, "overview", real)
    tasks[1].start(2)
    array.run.record.unlink()
    array.run.record.write_text(json.dumps({**record, "array_size": 2}))
    assert [one.state for one in listed([array.run], patient=True)] == ["lost"]
