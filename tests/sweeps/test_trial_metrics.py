"""Following one trial's metrics over its attempts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.run_dir import RunDir
from hpcaccel.sweeps.running_trial import TrialMetrics


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "trials" / "3")
    run.create()
    return run


def log(run: RunDir, step: int, *, attempt: int = 1, **values: float) -> None:
    append_line(run.metrics, {"step": step, "attempt": attempt, "time": 1.0, "epoch": 0, "values": values})


def append(run: RunDir, text: str, *, attempt: int = 1) -> None:
    run.attempt(attempt).mkdir(exist_ok=True)
    with run.foreign_metrics(attempt).open("a") as file:
        file.write(text)


def test_requested_metrics_are_returned_once(run: RunDir) -> None:
    follower = TrialMetrics(run, ["loss"])
    assert follower.read() == []
    log(run, 1, loss=3.0, lr=0.1)
    log(run, 2, lr=0.1)
    assert follower.read() == [(1, {"loss": 3.0})]
    assert (follower.step, follower.seen) == (2, {"loss", "lr"})
    log(run, 3, loss=2.0)
    assert follower.read() == [(3, {"loss": 2.0})]
    assert follower.read() == []
    assert follower.last == {"loss": (3, 2.0)}


def test_repeated_step_is_returned_once_with_its_newest_value(run: RunDir) -> None:
    for step in (1, 2, 3):
        log(run, step, loss=10.0 - step)
    log(run, 2, attempt=2, loss=7.5)
    assert TrialMetrics(run, ["loss"]).read() == [(1, {"loss": 9.0}), (2, {"loss": 7.5}), (3, {"loss": 7.0})]


def test_step_returned_before_a_resume_is_not_returned_again(run: RunDir) -> None:
    follower = TrialMetrics(run, ["loss"])
    log(run, 1, loss=3.0)
    log(run, 2, loss=2.0)
    follower.read()
    log(run, 2, attempt=2, loss=2.25)
    assert follower.read() == []
    assert follower.last == {"loss": (2, 2.25)}
    log(run, 3, attempt=2, loss=1.0)
    assert follower.read() == [(3, {"loss": 1.0})]


def test_metrics_of_one_step_logged_separately_are_all_returned(run: RunDir) -> None:
    follower = TrialMetrics(run, ["loss", "acc"])
    log(run, 1, loss=3.0)
    assert follower.read() == [(1, {"loss": 3.0})]
    log(run, 1, acc=0.5)
    log(run, 2, loss=2.0)
    log(run, 2, acc=0.6)
    assert follower.read() == [(1, {"acc": 0.5}), (2, {"loss": 2.0, "acc": 0.6})]


def test_foreign_metrics_file_is_followed_across_attempts(run: RunDir) -> None:
    follower = TrialMetrics(run, ["loss"])
    append(run, '{"loss": 0.5}\n{"loss": NaN}\n')
    (first, (step, values)) = follower.read()
    assert first == (1, {"loss": 0.5})
    assert step == 2
    assert math.isnan(values["loss"])
    append(run, '{"loss": 0.5}\n{"loss": 0.4}\n{"loss": 0.3}\n', attempt=2)  # the new attempt starts at step 1 again
    assert follower.read() == [(3, {"loss": 0.3})]


def test_error_for_a_metric_never_logged_lists_the_logged_metrics(run: RunDir) -> None:
    follower = TrialMetrics(run, ["loss"])
    assert follower.never_logged == "metric 'loss' was never logged; the trial logged: nothing"
    log(run, 1, train_loss=1.0, acc=0.1)
    follower.read()
    assert follower.never_logged == "metric 'loss' was never logged; the trial logged: acc, train_loss"
    log(run, 1, loss=1.0)
    follower.read()
    assert follower.never_logged == ""
    layers: dict[str, Any] = {f"layer{i:02d}": 1.0 for i in range(20)}
    log(run, 1, **layers)
    several = TrialMetrics(run, ["a", "b"])
    several.read()
    said = several.never_logged
    assert said.startswith("metrics 'a', 'b' were never logged; the trial logged: acc, layer00, ")
    assert said.endswith("layer10 and 11 more")


def test_error_for_a_metric_that_is_not_a_number_shows_its_value(run: RunDir) -> None:
    append(run, '{"loss": "0.5", "acc": 1}\n')
    follower = TrialMetrics(run, ["loss"])
    follower.read()
    said = "metric 'loss' was never logged as a number: the trial logged '0.5' for 'loss'"
    assert follower.never_logged == said
    append_line(run.metrics, {"step": 1, "attempt": 1, "time": 1.0, "values": {"loss": None, "acc": 1}})
    through_us = TrialMetrics(RunDir(run.path), ["acc", "loss"])
    through_us.read()
    assert through_us.never_logged == said.replace("'0.5'", "None")


def test_error_for_a_metric_never_logged_lists_skipped_lines(run: RunDir) -> None:
    append(run, "loss=0.5\n")
    follower = TrialMetrics(run, ["loss"])
    follower.read()
    assert follower.never_logged == (
        "metric 'loss' was never logged; the trial logged: nothing. In $HPCACCEL_METRICS 1 line was skipped: "
        f"line 1 of {run.foreign_metrics(1)}: not JSON: 'loss=0.5'"
    )
