"""Tests of reading metrics incrementally."""

from __future__ import annotations

import math

from hpcaccel.core.metrics_reader import Line
from hpcaccel.submission.runs.attempts import Metrics


def read(metrics: Metrics) -> list[Line]:
    lines: list[Line] = []
    metrics.read(into=lines)
    return lines


def test_only_new_metric_lines_are_read(hand_made):
    metrics = Metrics(hand_made.run)
    assert read(metrics) == []
    assert metrics.step is None

    hand_made.metric(1, attempt=1, loss=5.5)
    hand_made.metric(2, attempt=1, loss=5.0)
    assert [m.step for m in read(metrics)] == [1, 2]
    assert read(metrics) == []

    hand_made.metric(3, attempt=1, loss=4.5)
    assert [m.step for m in read(metrics)] == [3]
    assert metrics.first["loss"] == (1, 5.5)
    assert metrics.last["loss"] == (3, 4.5)


def test_incomplete_metric_line_is_read_after_its_end_is_written(hand_made):
    metrics = Metrics(hand_made.run)
    hand_made.run.metrics.write_text('{"step": 1, "attempt": 1, "time": 1.0, "val')
    assert read(metrics) == []
    with hand_made.run.metrics.open("a") as file:
        file.write('ues": {"loss": 2.0}}\n')
    assert [m.values for m in read(metrics)] == [{"loss": 2.0}]


def test_last_step_and_value_are_those_of_the_newer_attempt(hand_made):
    for step in (1, 2, 3):
        hand_made.metric(step, attempt=1, loss=10.0 - step)
    for step in (2, 3, 4):
        hand_made.metric(step, attempt=2, loss=20.0 - step)
    metrics = Metrics(hand_made.run)
    metrics.read()

    assert metrics.step == 4
    assert metrics.last["loss"] == (4, 16.0)
    assert metrics.first["loss"] == (1, 9.0)
    assert metrics.last_step == {1: 3, 2: 4}


def test_seconds_per_step_are_those_of_the_newest_attempt(hand_made):
    hand_made.metric(1, attempt=1, time=0.0)
    hand_made.metric(11, attempt=1, time=10.0)
    metrics = Metrics(hand_made.run)
    metrics.read()
    assert metrics.seconds_per_step() == 1.0

    hand_made.metric(12, attempt=2, time=5000.0)  # after a long time in the queue
    metrics.read()
    assert metrics.seconds_per_step() is None
    hand_made.metric(14, attempt=2, time=5001.0)
    metrics.read()
    assert metrics.seconds_per_step() == 0.5


def test_invalid_metric_lines_and_values_are_ignored(hand_made):
    hand_made.run.metrics.write_text(
        '[1]\n{"step": "one"}\nnonsense\n{"step": 1, "attempt": 1, "time": 0, "values": {"loss": NaN, "note": "x"}}\n'
    )
    (metric,) = read(Metrics(hand_made.run))
    assert list(metric.values) == ["loss"]
    assert math.isnan(metric.values["loss"])


def append(hand_made, text, *, attempt):
    with hand_made.run.foreign_metrics(attempt).open("a") as file:
        file.write(text)


def test_metrics_appended_by_a_program_are_read_like_logged_ones(hand_made):
    hand_made.start(1)
    hand_made.start(2)
    hand_made.metric(1, attempt=1, loss=9.0)
    append(hand_made, '{"step": 1, "acc": 0.1}\n{"step": 2, "acc": 0.2}\n', attempt=1)
    append(hand_made, '{"step": 2, "acc": 0.25}\n', attempt=2)
    metrics = Metrics(hand_made.run)
    metrics.read()
    assert metrics.last == {"loss": (1, 9.0), "acc": (2, 0.25)}
    assert metrics.first["acc"] == (1, 0.1)
    assert (metrics.step, metrics.last_step) == (2, {1: 2, 2: 2})


def test_late_metric_of_previous_attempt_does_not_replace_newer_one(hand_made):
    hand_made.start(1)
    metrics = Metrics(hand_made.run)
    hand_made.start(2)
    hand_made.metric(3, attempt=2, loss=3.0)
    metrics.read()
    append(hand_made, '{"step": 4, "loss": 4.0}\n', attempt=1)
    metrics.read()
    assert metrics.last == {"loss": (3, 3.0)}
