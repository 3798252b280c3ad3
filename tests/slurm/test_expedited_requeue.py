"""Tests of Slurm's expedited requeue: which clusters support it, and the states of an expediting job."""

from __future__ import annotations

import pytest

from hpcaccel.slurm.site_parsing import why_not_expedited
from hpcaccel.slurm.states import JobState, parse_state

ENABLED = {"SlurmctldParameters": "idle_on_node_suspend,enable_expedited_requeue"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"SLURM_VERSION": "26.11.0-0rc1", **ENABLED}, ""),
        ({"SLURM_VERSION": "25.11.0", **ENABLED}, ""),
        ({"SLURM_VERSION": "25.05.8", **ENABLED}, "needs Slurm 25.11 or newer, and this cluster runs 25.05.8"),
        ({"SLURM_VERSION": "22.05.8"}, "needs Slurm 25.11 or newer, and this cluster runs 22.05.8"),
        ({"SLURM_VERSION": "26.11.0", "SlurmctldParameters": ""}, "lacks enable_expedited_requeue"),
        ({}, "an unknown release"),
    ],
)
def test_expedited_requeue_needs_slurm_25_11_and_its_parameter(settings: dict[str, str], reason: str) -> None:
    assert (why_not_expedited(settings) == "") is (reason == "")
    assert reason in why_not_expedited(settings)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("EXPEDITING", JobState.EXPEDITING),
        ("PENDING,EXPEDITING", JobState.EXPEDITING),
        ("COMPLETING,EXPEDITING", JobState.COMPLETING),
        ("REQUEUED+EXPEDITING", JobState.REQUEUED),
    ],
)
def test_expediting_job_is_pending_or_ending(text: str, state: JobState) -> None:
    assert parse_state(text) is state
    assert state.is_pending or state.is_ending
    assert not state.is_ended
