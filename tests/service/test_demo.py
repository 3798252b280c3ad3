"""``serve --demo``: what its runs show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hpcaccel import service
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.service.app import create_app
from hpcaccel.service.demo_runs import demo_runs
from hpcaccel.service.run_source import RunSource
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.view.merged_log import first_traceback
from hpcaccel.view.sweep_view import sweep_view

RECORDING = Path(service.__file__).with_name("demo_runs.tar.xz")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patched:
        for name in ("HPCACCEL_RUNS_DIR", "XDG_STATE_HOME"):
            patched.setenv(name, "")  # the demo changes both, and the patch restores them
        with demo_runs() as folder:
            yield folder
    assert not folder.exists()


@pytest.fixture
def settings(place: Path) -> ServiceSettings:
    return ServiceSettings(token="x" * 20, runs_dir=place, demo=True)


@pytest.fixture
def source(settings: ServiceSettings) -> RunSource:
    return RunSource(settings)


def test_demo_has_runs_in_every_state_that_matters(source: RunSource) -> None:
    rows, _ = source.rows()
    runs = {(run.name, run.state): run for run in (source.overview(row.run_id) for row in rows)}
    running, paused = runs["text-live", "running"], runs["text-wide", "paused"]
    completed, failed = runs["text-small", "completed"], runs["text-small", "failed"]
    assert running.at_risk is not None
    assert [rank.rank for rank in running.ranks] == [0, 1]
    assert paused.steps_lost == 0
    assert completed.attempts == 2
    assert completed.goodput is not None
    assert "hung" in {part.part for part in runs["text-hang", "failed"].life}
    found = first_traceback(source.find(failed.run_id).dir)
    assert found is not None
    assert found[0] == 1
    assert "IndexError" in found[1]
    for run in runs.values():
        assert run.ended is None or time.time() - 3600 < run.ended <= time.time()


def test_demo_has_a_sweep_with_pruned_trials(source: RunSource) -> None:
    sweep = sweep_view(SweepDir(source.find("text-search").path))
    assert sweep.trials["complete"] + sweep.trials["pruned"] == 14
    assert sweep.trials["pruned"] > 0
    assert sweep.best is not None
    assert sweep.curves
    assert sweep.rungs


def test_demo_says_what_it_is_and_changes_nothing(settings: ServiceSettings) -> None:
    headers = {"Authorization": f"Bearer {settings.token}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1", headers=headers) as client:
        assert "recorded runs" in client.get("/_dash-layout").text
        for route in ("runs", "runs/text-wide/resume", "runs/text-live/cancel", "sweeps"):
            answer = client.post(f"/api/v1/{route}")
            assert answer.status_code == 409
            assert "demo" in answer.json()["error"]
        checked = client.post("/api/v1/check", json={"yaml": "name: x\nentrypoint: {command: [true]}\n"})
        assert checked.status_code == 200


def test_recording_is_small() -> None:
    assert RECORDING.stat().st_size < 300_000
