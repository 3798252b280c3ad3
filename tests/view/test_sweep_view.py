"""Tests of the view of a sweep: best so far against GPU-hours, rungs, curves, table, importances."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import append_line, make_folder
from hpcaccel.core.records import WorkerSeen, WorkerStart, to_dict
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view import sweep_importances
from hpcaccel.view.sweep_view import RungCount, SweepView, sweep_view
from tests.sweeps.conftest import own_home as own_home
from tests.sweeps.conftest import place as place
from tests.sweeps.sweeping import Place, Trials

RECORDED = Path(__file__).parents[1] / "data" / "recorded" / "runs" / "tuned"


def seen(sweep: SweepDir, **options: bool) -> SweepView:
    status = RunStatus(run_id=sweep.run_id, name="demo", state="running", tasks=())
    return sweep_view(sweep, status, **options)


def test_best_so_far_rises_with_the_gpu_hours_of_the_workers(place: Place) -> None:
    sweep, _ = place.start()
    trials = Trials(sweep.dir)
    numbers = [trials.complete(value) for value in (5.0, 7.0, float("inf"), 3.0)]
    ended = {trial.number: trial.ended or 0.0 for trial in sweep.trials}
    began = ended[numbers[0]] - 3600.0
    account = sweep.dir.worker(0).account
    make_folder(account.parent)
    for line in (WorkerStart(time=began, job_id="1_0", gpus=4), WorkerSeen(time=ended[numbers[-1]])):
        append_line(account, to_dict(line))
    view = seen(sweep.dir)

    assert [value for _, value in view.best_so_far] == [5.0, 3.0]
    assert view.best_so_far[0][0] == pytest.approx(4.0)
    assert view.best_so_far[1][0] == pytest.approx(4.0 + 4 * (ended[3] - ended[0]) / 3600)
    assert view.best is not None
    assert (view.best.number, view.best.value, view.metric, view.direction) == (3, 3.0, "loss", "min")
    assert view.trials["complete"] == 4
    assert [row["trial"] for row in view.rows] == numbers
    assert json.dumps(view.to_json(), allow_nan=False)


def test_rungs_and_curves(place: Place) -> None:
    sweep, _ = place.start("sweep.pruner={asha: {min_steps: 2, reduction_factor: 2, max_steps: 8}}")
    trials = Trials(sweep.dir)
    for number, last in enumerate((8, 2, 4)):
        assert trials.begin() == number
        for step in (2, 4, 8)[: (2, 4, 8).index(last) + 1]:
            trials.study.report(number, step, float(number))
    trials.study.prune(1)
    for step in range(1, 1001):
        append_line(sweep.dir.trial(0).metrics, {"step": step, "attempt": 1, "time": 0.0, "values": {"loss": 1 / step}})
    view = seen(sweep.dir)

    assert view.rungs[:2] == [RungCount(step=2, entered=3, promoted=2), RungCount(step=4, entered=2, promoted=2)]
    assert [(one.trial, one.state) for one in view.curves] == [(0, "running"), (1, "pruned"), (2, "running")]
    assert len(view.curves[0].points) == 100
    assert view.curves[1].points == [(2, 1.0)]


def test_new_trials_are_read_and_a_sweep_without_trials_is_shown(place: Place) -> None:
    sweep, _ = place.start()
    empty = seen(sweep.dir)
    Trials(sweep.dir).complete(1.0)

    assert (empty.best, empty.curves, empty.best_so_far, empty.rungs, empty.rows) == (None, [], [], [], [])
    assert seen(sweep.dir).trials["complete"] == 1


def test_importances_come_from_a_child_process_and_are_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, _ = place.start()
    trials = Trials(sweep.dir)
    for number in range(8):
        trials.complete(1.0 + number % 5)
    found = seen(sweep.dir, wait_for_importances=True).importances

    assert set(found) == {"args.lr", "args.depth"}
    assert sum(found.values()) == pytest.approx(1.0)
    monkeypatch.setattr(sweep_importances, "_compute", lambda path, ended: pytest.fail("computed again"))
    assert seen(sweep.dir, wait_for_importances=True).importances == found


def test_recorded_sweep_is_viewed_without_optuna() -> None:
    code = (
        "import sys, json; from hpcaccel.core.sweep_dir import SweepDir;"
        "from hpcaccel.view.sweep_view import sweep_view; view = sweep_view(SweepDir(sys.argv[1]));"
        "assert 'optuna' not in sys.modules; assert 'torch' not in sys.modules;"
        "print(json.dumps(view.to_json()))"
    )
    (path,) = RECORDED.iterdir()
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    view = json.loads(done.stdout or done.stderr)

    assert (view["name"], view["metric"], view["direction"]) == ("tuned", "loss", "min")
    assert view["best"]["number"] in (0, 1)
    assert [curve["trial"] for curve in view["curves"]] == [0, 1]
    assert all(len(curve["points"]) == 48 for curve in view["curves"])
    assert len(view["rows"]) == 4


def test_run_is_not_a_sweep(hand_made) -> None:
    with pytest.raises(RunDirectoryError):
        sweep_view(SweepDir(hand_made.run.path), RunStatus(run_id="x", name="x", state="running"))
