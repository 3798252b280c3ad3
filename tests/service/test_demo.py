"""``serve --demo``: what its runs show."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.service.demo_runs import demo_runs
from hpcaccel.service.run_source import RunSource
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.view.merged_log import first_traceback


def test_demo_has_runs_in_every_state_that_matters(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_RUNS_DIR", "")  # the demo changes both, and the test restores them
    monkeypatch.setenv("XDG_STATE_HOME", "")
    with demo_runs() as place:
        source = RunSource(ServiceSettings(token="x" * 20, runs_dir=place))
        rows, total = source.rows()
        runs = [source.overview(row.run_id) for row in rows]
        assert total == 4
        assert [run.state for run in runs] == ["running", "paused", "failed", "completed"]
        running, _, failed, completed = runs
        assert running.at_risk is not None
        assert running.at_risk.steps_since_commit == 200
        assert {rank.rank for rank in running.ranks if rank.state == "slow"} == {6}
        assert {rank.rank for rank in running.ranks if rank.idle_gpu} == {7}
        assert completed.goodput is not None
        assert completed.goodput > 0.8
        found = first_traceback(source.find(failed.run_id).dir)
        assert found is not None
        assert found[0] == 3
    assert not place.exists()
