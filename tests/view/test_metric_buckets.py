"""Tests of down-sampled curves of metrics, which are kept between calls."""

from __future__ import annotations

import math

from hpcaccel.core.metrics_reader import Logged
from hpcaccel.view import metric_buckets
from hpcaccel.view.kept_readings import KeptReadings
from hpcaccel.view.metric_buckets import Bucket, metric_names, metrics_buckets


def test_each_bucket_has_minimum_maximum_and_mean(hand_made):
    for step in range(1, 101):
        hand_made.metric(step, attempt=1, loss=float(step % 10))
    found = metrics_buckets(hand_made.run, ["loss", "unknown"], 10)

    assert found["unknown"] == []
    assert len(found["loss"]) == 10
    first = found["loss"][0]
    assert first == Bucket(step_first=1, step_last=10, min=0.0, max=9.0, mean=4.5, attempt=1, count=10)
    assert sum(one.count for one in found["loss"]) == 100


def test_few_points_have_a_bucket_each(hand_made):
    for step in (0, 50, 400):
        hand_made.metric(step, attempt=1, loss=float(step))

    assert [(one.step_first, one.mean) for one in metrics_buckets(hand_made.run, ["loss"], 500)["loss"]] == [
        (0, 0.0), (50, 50.0), (400, 400.0)
    ]  # fmt: skip


def test_later_attempt_replaces_the_steps_it_repeats(hand_made):
    for attempt, steps in ((1, range(1, 31)), (2, range(21, 26)), (3, range(21, 41))):
        for step in steps:
            hand_made.metric(step, attempt=attempt, loss=float(attempt))
    found = metrics_buckets(hand_made.run, ["loss"], 4)["loss"]

    assert [(one.step_first, one.step_last, one.attempt, one.mean) for one in found] == [
        (1, 10, 1, 1.0), (11, 20, 1, 1.0), (21, 30, 3, 3.0), (31, 40, 3, 3.0)
    ]  # fmt: skip


def test_rare_metric_of_an_abandoned_branch_is_left_out(hand_made):
    hand_made.metric(10, attempt=1, loss=1.0, accuracy=0.1)
    hand_made.metric(20, attempt=1, loss=1.0, accuracy=0.2)
    hand_made.metric(11, attempt=2, loss=1.0)

    assert [one.step_first for one in metrics_buckets(hand_made.run, ["accuracy"])["accuracy"]] == [10]


def test_values_that_are_not_finite_and_unordered_steps(hand_made):
    for step, value in ((3, 3.0), (1, 1.0), (2, math.nan), (4, math.inf)):
        hand_made.metric(step, attempt=1, loss=value)

    assert [(one.step_first, one.mean) for one in metrics_buckets(hand_made.run, ["loss"])["loss"]] == [
        (1, 1.0), (3, 3.0)
    ]  # fmt: skip


def test_only_new_lines_are_read_again(hand_made, monkeypatch):
    for step in range(1, 11):
        hand_made.metric(step, attempt=1, loss=1.0)
    metrics_buckets(hand_made.run, ["loss"])
    read = []
    parse = Logged._our_line
    monkeypatch.setattr(Logged, "_our_line", lambda self, raw: read.append(raw) or parse(self, raw))
    hand_made.metric(11, attempt=1, loss=2.0)
    found = metrics_buckets(hand_made.run, ["loss"], 1)["loss"]

    assert (len(read), found[0].count, found[0].max) == (1, 11, 2.0)
    assert metric_names(hand_made.run) == ["loss"]


def test_run_that_was_used_longest_ago_is_dropped(tmp_path, monkeypatch):
    from .conftest import HandMade

    kept = KeptReadings(metric_buckets._Series, most=30, size=lambda series: series.count)
    monkeypatch.setattr(metric_buckets, "_SERIES", kept)
    runs = [HandMade(tmp_path / name / "20261120-153012-4f2a") for name in ("a", "b", "c")]
    for run in runs:
        for step in range(1, 13):
            run.metric(step, attempt=1, loss=1.0)
        assert metrics_buckets(run.run, ["loss"], 1)["loss"][0].count == 12

    assert list(kept._kept) == [run.run.path for run in runs[1:]]
