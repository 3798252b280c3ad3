"""Tests of the ledger: the caps that end a run, and the end that a job wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.launch_spec import RestartPolicy
from hpcaccel.core.records import AttemptEnd, AttemptStart
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.ledger import Ledger

from .conftest import RESILIENCE

LIMITS: dict[str, Any] = dict(RESILIENCE)


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (("exception",), None),
        (("exception", "exception"), "2 failures without a new checkpoint"),
        (("exception", "launch"), None),
        (("launch", "launch"), None),
        (("step_memory", "step_memory"), None),
        (("launch", "exception", "exception"), "2 failures without a new checkpoint"),
        (("launch", "launch", "launch"), "3 failures"),
    ],
)
def test_failures_without_a_new_checkpoint_are_capped(
    tmp_path: Path, classes: tuple[str, ...], words: str | None
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    ledger = Ledger.of(run)
    for attempt, name in enumerate(classes, 1):
        ledger.start(AttemptStart(attempt=attempt, time=0.0, job_id="1"))
        ledger.end(AttemptEnd(attempt=attempt, time=1.0, reason="failed", decision="restart", error_class=name))
    cap = ledger.cap(["1"], RestartPolicy(**LIMITS))
    assert cap is None if words is None else cap is not None and words in cap


def ended(tmp_path: Path, reason: str, *lines: dict[str, Any], **limits: Any) -> str | None:
    """The cap that applies after attempts that all ended for one reason, or None."""
    run = RunDir(tmp_path / "run")
    run.create()
    ledger = Ledger.of(run)
    for attempt, facts in enumerate(lines, 1):
        ledger.start(AttemptStart(attempt=attempt, time=0.0, job_id="1"))
        end: dict[str, Any] = {"attempt": attempt, "time": 1.0, "reason": reason, "decision": "requeue", **facts}
        ledger.end(AttemptEnd(**end))
    return ledger.cap(["1"], RestartPolicy(**{**LIMITS, "max_failures": 99, **limits}))


def test_max_failures_of_zero_allows_the_first_attempt(tmp_path: Path) -> None:
    assert ended(tmp_path, "failed", max_failures=0) is None


def test_max_failures_of_zero_ends_the_run_at_the_first_failure(tmp_path: Path) -> None:
    assert ended(tmp_path, "failed", {}, max_failures=0) == "1 failure (resilience.max_failures: 0)"


@pytest.mark.parametrize(("times", "capped"), [(1, False), (2, True)])
def test_run_survives_max_preemptions_and_the_next_one_ends_it(tmp_path: Path, times: int, capped: bool) -> None:
    assert (ended(tmp_path, "preempted", *[{}] * times, max_preemptions=1) is not None) == capped


@pytest.mark.parametrize(
    ("start", "end", "mine"),
    [
        ({"job_id": "1"}, {}, True),  # a line of an earlier release
        ({"job_id": "1"}, {"job_id": "1"}, True),
        (None, {"job_id": "1"}, True),  # paused before the ranks started
        (None, {"job_id": "2"}, False),
        (None, {}, False),
    ],
)
def test_ended_by_finds_the_end_that_a_job_wrote(
    tmp_path: Path, start: dict[str, str] | None, end: dict[str, str], mine: bool
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    ledger = Ledger.of(run)
    if start is not None:
        ledger.start(AttemptStart(attempt=1, time=0.0, **start))  # type: ignore[arg-type]
    ledger.end(AttemptEnd(attempt=1, time=1.0, reason="stop", decision="pause", **end))  # type: ignore[arg-type]
    assert (Ledger.of(run).ended_by("1") is not None) is mine


GOES_ON = [
    [{"checkpoint_step": 100}, {"checkpoint_step": 200}, {"checkpoint_step": 300}],
    # An outcome has the step, and perhaps the program's own checkpoint.
    [{"last_step": 28, "checkpoint": "checkpoint-28", "checkpoint_step": 28}, {"last_step": 56, "checkpoint_step": 56}],
    [{"last_step": 28}, {"last_step": 56}, {"last_step": 84}],
    # The metrics show the steps at which each attempt began and ended.
    [{"first_logged": 1, "last_step": 230}, {"first_logged": 201, "last_step": 430}],
    [{"first_logged": 10, "last_step": 90}, {"first_logged": 60, "last_step": 80}, {"first_logged": 70}],
    # A program that uses the runtime, but saves and loads by itself.
    [{"resumed_step": 0, "first_logged": 1, "last_step": 50}, {"resumed_step": 0, "first_logged": 41, "last_step": 90}],
]
GETS_NOWHERE = [
    [{}, {}],
    [{"checkpoint_step": 100}, {"checkpoint_step": 100}],
    [{"last_step": 28}, {"last_step": 28}],
    [{"last_step": 28}, {"last_step": 27}],
    # It starts from the beginning each time, however far it gets.
    [{"first_logged": 1, "last_step": 230}, {"first_logged": 1, "last_step": 260}],
    [{"resumed_step": 0, "first_logged": 1, "last_step": 80}, {"resumed_step": 0, "first_logged": 1, "last_step": 95}],
    [{"first_logged": 1}, {"first_logged": 201, "last_step": 230}, {"first_logged": 201, "last_step": 240}],
    # Lines of earlier releases, which have 0 where nothing is known.
    [{"resumed_step": 0, "last_step": 80}, {"resumed_step": 0, "last_step": 95}],
]


@pytest.mark.parametrize(
    ("reason", "word"), [("failed", "failures"), ("time_limit", "attempts ended by the time limit")]
)
@pytest.mark.parametrize(
    ("lines", "stuck"), [*((lines, False) for lines in GOES_ON), *((lines, True) for lines in GETS_NOWHERE)]
)
def test_attempts_without_progress_are_capped(
    tmp_path: Path, lines: list[dict[str, Any]], stuck: bool, reason: str, word: str
) -> None:
    cap = ended(tmp_path, reason, *lines)
    assert cap == (f"2 {word} without a new checkpoint" if stuck else None)


def test_programs_own_checkpoints_are_progress(tmp_path: Path) -> None:
    lines = [{"checkpoint": f"/out/checkpoint-{step}", "checkpoint_step": step} for step in (10, 20, 30)]
    assert ended(tmp_path, "time_limit", *lines) is None


def test_own_checkpoint_that_stays_the_newest_is_no_progress(tmp_path: Path) -> None:
    lines = [{"checkpoint": "/out/checkpoint-10", "checkpoint_step": 10}] * 3
    assert ended(tmp_path, "time_limit", *lines) == "2 attempts ended by the time limit without a new checkpoint"


def test_own_checkpoints_without_a_step_are_progress_while_they_are_new(tmp_path: Path) -> None:
    new = [{"checkpoint": f"/out/{name}.pt"} for name in ("a", "b", "c")]
    assert ended(tmp_path / "new", "time_limit", *new) is None
    assert ended(tmp_path / "same", "time_limit", *new, new[-1], new[-1]) is not None
