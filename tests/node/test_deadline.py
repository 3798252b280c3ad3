"""Tests of the times of a stop: how long before the limit it begins, and how long the ranks may take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.rank_records import Timing
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.stop_timing import Pace, lead_seconds, patience_seconds, read_pace

from .conftest import LocalRun, outcome

QUICK = Pace(save_seconds=2, step_seconds=0.5, slowest_step_seconds=1)
SLOW = Pace(save_seconds=300, step_seconds=4, slowest_step_seconds=60)


@pytest.mark.parametrize(
    ("pace", "limit", "seconds"),
    [
        (None, 7200, 120),
        (QUICK, 7200, 120),
        (SLOW, 7200, 60 + 4 + 330 + 5 + 15),
        (SLOW, 600, 300),
        (SLOW, 100, 120),
    ],
    ids=["nothing measured", "saves are quick", "saves are slow", "at most half of the limit", "never less than asked"],
)
def test_lead_seconds_depend_on_pace_and_limit(pace: Pace | None, limit: float, seconds: float) -> None:
    assert lead_seconds(pace, warning_seconds=120, limit_seconds=limit) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("pace", "left", "seconds"),
    [
        (None, None, 300),
        (QUICK, None, 300),
        (SLOW, None, 60 + 4 + 330 + 5),
        (SLOW, 414, 399),
        (QUICK, 60, 45),
        (None, 20, 15),
        (None, 0.5, 1),
    ],
    ids=[
        "as the spec says", "quick", "a save that takes longer is waited for", "and the requeue too", "near the end",
        "very near", "now",
    ],
)  # fmt: skip
def test_patience_seconds_depend_on_pace_and_time_left(pace: Pace | None, left: float | None, seconds: float) -> None:
    assert patience_seconds(pace, stop_timeout_seconds=300, left_seconds=left) == pytest.approx(seconds)


def test_lead_is_long_enough_for_the_slowest_save_and_the_requeue() -> None:
    lead = lead_seconds(SLOW, warning_seconds=120, limit_seconds=7200)
    assert patience_seconds(SLOW, stop_timeout_seconds=300, left_seconds=lead) >= SLOW.needed_seconds


def test_pace_is_read_from_timing_and_saves(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    assert read_pace(run, 1) is None
    write_json(run.timing(1), to_dict(Timing(step_seconds=0.25, slowest_step_seconds=3.0)))
    assert read_pace(run, 1) is None, "no save, nothing to go by"
    write_json(run.timing(1), to_dict(Timing(step_seconds=0.25, slowest_step_seconds=3.0, slowest_save_seconds=4.0)))
    assert read_pace(run, 1) == Pace(save_seconds=4.0, step_seconds=0.25, slowest_step_seconds=3.0)
    append_line(run.saves(1), {"step": 5, "stall_seconds": 0.1, "seconds": 9.0})
    append_line(run.saves(1), {"step": 9, "stall_seconds": 0.1, "seconds": 7.0})
    append_line(run.saves(1), {"step": 13, "stall_seconds": 0.1, "seconds": 60.0, "waited_seconds": 55.0})
    pace = read_pace(run, 1)
    assert pace is not None
    assert pace.save_seconds == 9.0
    run.timing(1).write_text("{")
    assert read_pace(run, 1) is None


SLOW_TO_SAVE = f"""
import json, os, signal, sys, time
folder = os.environ["HPCACCEL_RUN_DIR"] + "/attempts/" + os.environ["HPCACCEL_ATTEMPT"]
json.dump({{"slowest_save_seconds": 4.0, "step_seconds": 0.1}}, open(folder + "/timing.json", "w"))
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGTERM, signal.SIGUSR2}})
while os.environ["HPCACCEL_ATTEMPT"] == "1" and not asked:
    time.sleep(0.01)
if asked:
    time.sleep(4)
    {outcome(step=7, resume=True, reason="time_limit")}
    sys.exit(85)
"""


def test_real_program_that_saves_slowly_is_stopped_earlier(local_run: Callable[..., LocalRun]) -> None:
    """One second before the limit, as its spec says, would be too late."""
    run = local_run(SLOW_TO_SAVE, launch={"time_limit_seconds": 16}, warning_seconds=1)
    assert run.run() == 0
    assert run.ends == [("time_limit", "requeue"), ("completed", "end")], run.log
    assert run.lines("end")[0]["last_step"] == 7, run.log
    assert "killing them" not in run.log
