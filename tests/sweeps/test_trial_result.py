"""Outcome of a trial whose ranks have exited, and when a sweep is hopeless."""

from __future__ import annotations

from typing import Any

import pytest

from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.trial_result import TrialOutcome, decide_trial, hopeless
from hpcaccel.sweeps.tuner_protocol import Ended


def verdict(reason: str, decision: str = "end", *, error_class: str | None = None, **seen: Any) -> TrialOutcome:
    ended = Ended(trial=0, reason=reason, decision=decision, error_class=error_class, detail="said so")
    usual: dict[str, Any] = {
        "values": [1.0], "never_logged": "", "stop_reason": "", "over_budget": False, "failures": 0, "interruptions": 0,
        "retries": 1, "stopping": False,
    }  # fmt: skip
    return decide_trial(ended, **{**usual, **seen})


@pytest.mark.parametrize(
    ("ended", "seen", "state"),
    [
        (("completed", "end"), {}, "complete"),
        (("completed", "end"), {"stopping": True}, "complete"),
        (("completed", "end"), {"values": None}, "failed"),
        (("completed", "end"), {"values": [1.0, float("nan")]}, "failed"),
        (("pruned", "end"), {"stop_reason": "it was the worst"}, "pruned"),
        (("failed", "end"), {"failures": 1}, "again"),
        (("failed", "end"), {"failures": 2}, "failed"),
        (("failed", "end"), {"failures": 2, "stopping": True}, "left"),
        (("failed", "end"), {"failures": 1, "error_class": "busy"}, "left"),
        (("lost", "requeue"), {"interruptions": 1}, "again"),
        (("lost", "requeue"), {"interruptions": 4}, "failed"),
        (("preempted", "requeue"), {"stopping": True}, "left"),
        (("stop", "pause"), {}, "left"),
        (("cancelled", "end"), {}, "failed"),
        (("cancelled", "end"), {"stopping": True}, "left"),
    ],
)
def test_trial_outcome_for_each_end_reason(ended: tuple[str, str], seen: dict[str, Any], state: str) -> None:
    assert verdict(*ended, **seen).state == state


def test_trial_stopped_by_the_budget_has_error_class_budget() -> None:
    assert verdict("pruned", stop_reason="used up", over_budget=True).error_class == "budget"
    assert verdict("pruned", stop_reason="too bad").error_class is None


def failed(*classes: str) -> list[TrialRecord]:
    return [
        TrialRecord(number=number, state="failed", user_attrs={"error_class": name}, ended=float(number))
        for number, name in enumerate(classes)
    ]


def test_sweep_is_hopeless_after_equal_failures_of_its_first_trials() -> None:
    assert hopeless(failed(*["import"] * 4)) == ""
    assert "the first 5 trials all failed (import)" in hopeless(failed(*["import"] * 5))
    assert hopeless(failed(*["import"] * 4, "out_of_memory")) == ""
    assert hopeless([*failed(*["import"] * 9), TrialRecord(number=9, state="pruned")]) == ""
    assert hopeless(failed("metric", "metric")) == ""
    assert hopeless(failed("metric", "metric", "metric")) != ""
    assert hopeless(failed(*["cancelled"] * 9)) == ""


def test_surplus_trial_does_not_count_as_a_failure() -> None:
    given_back = TrialRecord(number=9, state="failed", user_attrs={"surplus": "all trials have begun"})
    assert hopeless([*failed(*["import"] * 4), given_back]) == ""
