from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hpcaccel.slurm.states import JobInfo, JobState, parse_duration, parse_state, parse_time


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", JobState.RUNNING),
        ("CANCELLED by 0", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("FAILED,COMPLETING", JobState.COMPLETING),
        ("PREEMPTED+REQUEUED", JobState.REQUEUED),
        ("RUNNING+SIGNALING", JobState.RUNNING),
        ("completing", JobState.COMPLETING),
        ("REQUEUE_HOLD", JobState.REQUEUE_HOLD),
        ("", JobState.UNKNOWN),
        ("TELEPORTED", JobState.UNKNOWN),
    ],
)
def test_parse_state(text: str, state: JobState) -> None:
    assert parse_state(text) is state


@pytest.mark.parametrize("state", list(JobState))
def test_each_known_state_is_of_exactly_one_kind(state: JobState) -> None:
    kinds = [state.is_pending, state.is_running, state.is_ending, state.is_ended]
    assert sum(kinds) == (0 if state is JobState.UNKNOWN else 1)


def test_requeued_completing_and_suspended_jobs_have_not_ended() -> None:
    assert JobState.REQUEUED.is_pending
    assert not JobState.COMPLETING.is_ended
    assert JobState.SUSPENDED.is_running
    assert JobState.PREEMPTED.is_ended


@pytest.mark.parametrize(
    ("state", "reason", "held"),
    [
        (JobState.PENDING, "JobHeldUser", True),
        (JobState.PENDING, "JobHeldAdmin", True),
        (JobState.PENDING, "(launch failed requeued held)", True),
        (JobState.PENDING, "Resources", False),
        (JobState.REQUEUE_HOLD, "", True),
        (JobState.RUNNING, "None", False),
    ],
)
def test_is_held_depends_on_state_and_reason(state: JobState, reason: str, held: bool) -> None:
    assert JobInfo(job_id="1", state=state, reason=reason).is_held is held


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:06", 6),
        ("5:00", 300),
        ("01:00:00", 3600),
        ("1-00:00:00", 86400),
        ("1-12", 129600),
        ("90", 5400),
        ("UNLIMITED", None),
        ("infinite", None),
        ("Partition_Limit", None),
        ("", None),
    ],
)
def test_parse_duration(text: str, seconds: int | None) -> None:
    assert parse_duration(text) == seconds


@pytest.fixture
def zurich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Zurich")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zurich")
def test_parse_time_uses_local_time_zone() -> None:
    assert parse_time("2026-11-20T22:58:21") == 1795211901.0
    assert parse_time("2026-07-01T00:00:00") == 1782856800.0


@pytest.mark.parametrize("text", ["Unknown", "None", "N/A", "", "(null)"])
def test_parse_time_of_missing_time_is_none(text: str) -> None:
    assert parse_time(text) is None


def test_address_of_array_task_is_array_id_and_index() -> None:
    assert JobInfo(job_id="48", array_job_id="46", array_task_id=0, state=JobState.RUNNING).address == "46_0"
    assert JobInfo(job_id="45", state=JobState.RUNNING).address == "45"
