"""Tests of the requeue of a preempted job: by Slurm at the end of the batch script, or by scontrol."""

from __future__ import annotations

from typing import Any

import pytest

from hpcaccel.errors import SlurmCommandError
from hpcaccel.node.allocation.requeue_at_end import requeued_at_its_end
from hpcaccel.node.allocation.slurm_allocation import SlurmAllocation
from hpcaccel.slurm.states import JobInfo, JobState, PartitionInfo
from tests.slurm.fake_slurm import FakeSlurm

PRIO = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
QOS = {"PreemptType": "preempt/qos", "PreemptMode": "GANG,REQUEUE"}


def slurm(
    version: str, settings: dict[str, str], *, mode: str = "REQUEUE", qos: str = "cluster", **job: Any
) -> FakeSlurm:
    fake = FakeSlurm(settings={"SLURM_VERSION": version, **settings})
    fake.known_partitions = [PartitionInfo(name="gpu", preempt_mode=mode)]
    fake.qos_rows = [{"Name": "low", "PreemptMode": qos}]
    changes = {"partition": "gpu", "qos": "low", "requeue": True, "preempt_time": 1.0, "state": JobState.RUNNING, **job}
    fake.jobs["7"] = JobInfo(job_id="7", **changes)
    return fake


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (slurm("26.11.0-0rc1", PRIO), True),
        (slurm("24.05.0", PRIO), True),
        (slurm("23.11.10", PRIO), False),
        (slurm("22.05.8", PRIO), False),
        (slurm("", PRIO), False),
        (slurm("26.11.0", PRIO, mode="CANCEL"), False),
        (slurm("26.11.0", PRIO, mode="GANG,REQUEUE"), True),
        (slurm("26.11.0", PRIO, requeue=False), False),
        (slurm("26.11.0", PRIO, preempt_time=None), False),
        (slurm("26.11.0", PRIO, state=JobState.COMPLETING), False),
        (slurm("26.11.0", QOS), True),
        (slurm("26.11.0", QOS, qos="cancel"), False),
        (slurm("26.11.0", QOS, qos="requeue", mode="CANCEL"), True),
        (slurm("26.11.0", {**QOS, "PreemptMode": "CANCEL"}), False),
        (slurm("26.11.0", {}), False),
        (slurm("26.11.0", PRIO, restarts=2), True),
        (slurm("26.11.0", PRIO, restarts=3), False),
        (slurm("26.11.0", {**PRIO, "MaxBatchRequeue": "5"}, restarts=3), False),
        (slurm("26.11.0", {**PRIO, "MaxBatchRequeue": "10"}, restarts=7), True),
        (slurm("26.11.0", {**PRIO, "MaxBatchRequeue": "10"}, restarts=8), False),
        (slurm("26.11.0", {**PRIO, "MaxBatchRequeue": "1"}), False),
    ],
)
def test_slurm_requeues_preempted_job_itself_by_version_and_mode(fake: FakeSlurm, expected: bool) -> None:
    assert requeued_at_its_end(fake, fake.jobs["7"]) is expected  # type: ignore[arg-type]


class Silent(FakeSlurm):
    def config(self) -> dict[str, str]:
        raise SlurmCommandError(["scontrol", "show", "config"], 1, "Unable to contact slurm controller")


def test_requeue_by_slurm_is_not_assumed_without_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    known = slurm("26.11.0", PRIO)
    assert not requeued_at_its_end(Silent(jobs=known.jobs), known.jobs["7"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "restarts", "asked"), [("26.11.0", 0, []), ("26.11.0", 3, ["7"]), ("22.05.8", 0, ["7"])]
)
def test_requeue_calls_scontrol_only_if_slurm_does_not_requeue_itself(
    monkeypatch: pytest.MonkeyPatch, version: str, restarts: int, asked: list[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setattr("time.sleep", lambda _: None)
    fake = slurm(version, PRIO, restarts=restarts)
    assert SlurmAllocation(fake).requeue() == ""  # type: ignore[arg-type]
    assert fake.requeued == asked
