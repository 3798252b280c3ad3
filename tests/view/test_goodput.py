"""Tests of the split of a run's time into parts: each second belongs to exactly one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcaccel.core.attempt_steps import AttemptSteps
from hpcaccel.core.rank_records import Timing
from hpcaccel.core.records import AttemptEnd, AttemptStart
from hpcaccel.view.goodput import PARTS, AttemptSpan, add_up, between, split

REASONS = ["completed", "preempted", "time_limit", "stop", "cancelled", "failed", "lost"]
DECISIONS = ["end", "requeue", "restart", "pause"]


def timing(**facts: float | None) -> Timing:
    """Starts at 100 s: launch 1 s, imports 2, meeting 3, build 4, load 5, first step 6, nine steps of 1 s, stall 2."""
    usual = {
        "process_started": 101.0, "imported": 103.0, "formed": 106.0, "prepared": 110.0, "loaded": 115.0,
        "first_step_time": 121.0, "resumed_step": 20, "last_step": 30, "last_step_time": 132.0, "step_seconds": 1.0,
        "saves": 1, "stall_seconds": 2.0,
    }  # fmt: skip
    return Timing(**{**usual, **facts})  # type: ignore[arg-type]


def span(
    times: Timing | None,
    *,
    ended: float = 140.0,
    reason: str = "completed",
    decision: str = "end",
    checkpoint_step: int | None = None,
    going_on: bool = False,
) -> AttemptSpan:
    start = AttemptStart(attempt=1, time=100.0, job_id="1")
    end = AttemptEnd(
        attempt=1,
        time=ended,
        reason=reason,  # type: ignore[arg-type]
        decision=decision,  # type: ignore[arg-type]
        checkpoint_step=checkpoint_step,
    )
    steps = AttemptSteps()
    if times is not None:
        steps = AttemptSteps(from_step=times.resumed_step, last_step=times.last_step, last_time=times.last_step_time)
    return AttemptSpan(
        start=start,
        end=None if going_on else end,
        ended=ended,
        timing=times,
        steps=steps,
    )


def test_completed_attempt_is_split_into_its_parts() -> None:
    work = split(span(timing(stall_after_last_step=0.0)), kept=None)
    assert work.seconds == pytest.approx(
        {
            "launch": 1, "imports": 2, "meeting": 3, "build": 4, "load": 5, "first_step": 5, "training": 10,
            "stall": 2, "leaving": 8,
        }
    )  # fmt: skip
    assert (work.steps, work.steps_kept) == (10, 10)


def test_repeated_steps_are_lost_and_time_from_last_step_to_end_is_hang() -> None:
    work = split(span(timing(), reason="failed", decision="restart"), kept=24)
    assert (work.steps, work.steps_kept) == (10, 4)
    assert {part: work.seconds[part] for part in ("training", "lost", "hang")} == {"training": 4, "lost": 6, "hang": 8}


def test_slow_steps_and_final_save_have_their_own_parts() -> None:
    work = split(span(timing(last_step_time=135.0, stall_seconds=4.0, stall_after_last_step=2.0)), kept=None)
    assert {part: work.seconds[part] for part in ("training", "slow", "stall", "leaving")} == pytest.approx(
        {"training": 10, "slow": 3, "stall": 4, "leaving": 3}
    )


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"imported": None, "formed": None, "prepared": None, "loaded": None}, "build"),
        ({"prepared": None, "loaded": None}, "build"),
        ({"loaded": None}, "load"),
        ({}, "first_step"),
    ],
)
def test_attempt_without_steps_ends_in_the_part_that_it_had_reached(facts: dict[str, None], part: str) -> None:
    times = timing(**{"first_step_time": None, "last_step": None, "last_step_time": None, **facts})
    seconds = split(span(times, reason="failed"), kept=None).seconds
    assert list(seconds)[-1] == part
    assert sum(seconds.values()) == pytest.approx(40)


def test_time_of_program_without_timing_is_untold() -> None:
    assert split(span(None), kept=None).seconds == {"untold": 40}


def before(decision: str) -> AttemptEnd:
    return AttemptEnd(attempt=1, time=100.0, reason="stop", decision=decision)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "seconds"),
    [
        (None, {"queue": 20, "launch": 5}),
        (before("requeue"), {"queue": 20, "launch": 5}),
        (before("restart"), {"launch": 25}),
        (before("pause"), {"paused": 12, "queue": 8, "launch": 5}),
    ],
    ids=["the first", "requeued", "in the same allocation", "resumed by somebody"],
)
def test_time_between_attempts_is_queue_paused_or_launch(end: AttemptEnd | None, seconds: dict[str, float]) -> None:
    start = AttemptStart(attempt=2, time=125.0, job_id="1", queued_at=112.0, allocated_at=120.0)
    assert between(end, 100.0, start) == seconds


# -- synthetic ledgers ------------------------------------------------------------------------------------------------

marks = st.lists(st.floats(0, 50), min_size=6, max_size=6)


@st.composite
def spans(draw: st.DrawFn) -> AttemptSpan:
    """Time marks in order; any may be missing, and some are later than the attempt's end (clocks differ)."""
    gaps, at = draw(marks), 100.0
    facts: dict[str, float | int | None] = {}
    names = ["process_started", "imported", "formed", "prepared", "loaded", "first_step_time"]
    for name, gap in zip(names, gaps, strict=True):
        at += gap
        facts[name] = at if draw(st.booleans()) else None
    facts["resumed_step"] = draw(st.integers(0, 50))
    if facts["first_step_time"] is not None:
        facts["last_step"] = facts["resumed_step"] + draw(st.integers(0, 50))
        facts["last_step_time"] = at + draw(st.floats(0, 100))
        facts["step_seconds"] = draw(st.none() | st.floats(0, 10))
        stall = draw(st.floats(0, 100))
        before, after = draw(st.floats(0, 1)) * stall / 2, draw(st.floats(0, 1)) * stall / 2
        facts |= {"stall_seconds": stall, "stall_before_first_step": before, "stall_after_last_step": after}
    return span(
        draw(st.none() | st.just(Timing(**facts))),  # type: ignore[arg-type]
        ended=100.0 + draw(st.floats(0, 400)),
        reason=draw(st.sampled_from(REASONS)),
        decision=draw(st.sampled_from(DECISIONS)),
        checkpoint_step=draw(st.none() | st.integers(0, 60)),
        going_on=draw(st.booleans()),
    )


@given(spans(), st.none() | st.integers(0, 100))
def test_every_second_of_an_attempt_is_in_exactly_one_part(one: AttemptSpan, kept: int | None) -> None:
    work = split(one, kept=kept)
    assert set(work.seconds) <= set(PARTS)
    assert all(value >= 0 for value in work.seconds.values())
    assert sum(work.seconds.values()) == pytest.approx(one.ended - one.start.time, abs=1e-6)
    assert 0 <= work.steps_kept <= work.steps


@given(
    st.sampled_from([None, *DECISIONS]), st.floats(0, 100), st.none() | st.floats(0, 200), st.none() | st.floats(0, 200)
)
def test_every_second_between_attempts_is_in_exactly_one_part(
    decision: str | None, gap: float, queued: float | None, allocated: float | None
) -> None:
    start = AttemptStart(attempt=2, time=50.0 + gap, job_id="1", queued_at=queued, allocated_at=allocated)
    seconds = between(None if decision is None else before(decision), 50.0, start)
    assert all(value >= 0 for value in seconds.values())
    assert sum(add_up([seconds]).values()) == pytest.approx(gap, abs=1e-6)
