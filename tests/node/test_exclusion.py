"""Tests of the nodes that a run excludes: which, how many, and for how long."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import LaunchSpec, RestartPolicy
from hpcaccel.core.records import AttemptEnd, AttemptStart
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation.scheduler_view import SchedulerView
from hpcaccel.node.allocation.slurm_allocation import SlurmAllocation
from hpcaccel.node.chain import ChainedAllocation
from hpcaccel.node.failures.exclusion import Exclusions, Placement
from hpcaccel.node.job import Job
from hpcaccel.node.ledger import Ledger
from hpcaccel.slurm import JobState
from hpcaccel.slurm.states import JobInfo, PartitionInfo
from tests.slurm.fake_slurm import FakeSlurm


def limits(**changes: Any) -> RestartPolicy:
    defaults: dict[str, Any] = {
        "requeue": True,
        "warning_seconds": 120,
        "stop_timeout_seconds": 20,
        "max_failures": 3,
        "max_preemptions": None,
        "restart_in_place": 2,
        "max_excluded": 2,
    }
    return RestartPolicy(**{**defaults, **changes})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_exclusion_outlives_the_job(run: RunDir) -> None:
    Exclusions.read(run, limits()).add(["n2"], why="gpu_error", detail="Xid 94", attempt=3)
    again = Exclusions.read(run, limits())
    assert again.active() == ["n2"]
    (one,) = again.nodes
    assert (one.why, one.detail, one.attempt, round(one.expires - one.time)) == ("gpu_error", "Xid 94", 3, 86400)


def test_exclusion_expires(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    exclusions = Exclusions.read(run, limits(exclude_hours=1))
    exclusions.add(["n2"], why="gpu_error", detail="", attempt=1)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert (exclusions.active(), exclusions.ever()) == ([], ["n2"])
    assert exclusions.room_for(["n2"]) == ["n2"]


def test_no_more_nodes_than_max_excluded_are_excluded(run: RunDir) -> None:
    exclusions = Exclusions.read(run, limits(max_excluded=2))
    assert exclusions.room_for(["n1", "n2", "n3"]) == ["n1", "n2"]
    exclusions.add(["n1"], why="gpu_error", detail="", attempt=1)
    assert exclusions.room_for(["n1", "n2", "n3"]) == ["n2"]
    assert Exclusions.read(run, limits(max_excluded=0)).room_for(["n2"]) == []


def test_job_on_an_excluded_node_tries_only_once_more(run: RunDir) -> None:
    Exclusions.read(run, limits()).add(["n2"], why="gpu_error", detail="", attempt=1)
    assert Exclusions.read(run, limits()).worth_another_try(["n2"])
    assert not Exclusions.read(run, limits()).worth_another_try(["n2"])


def test_hardware_failure_of_excluded_node_does_not_count_for_caps(run: RunDir) -> None:
    def cap(**changes: Any) -> str | None:
        ledger = Ledger.of(run)
        ledger.starts = [AttemptStart(attempt=n, time=0, job_id="45") for n in (1, 2)]
        ledger.ends = [
            AttemptEnd(attempt=n, time=0, reason="failed", decision="requeue", **changes) for n in (1, 2)
        ]  # fmt: skip
        return ledger.cap(["45"], limits())

    assert cap(error_class="gpu_error", nodes_excluded=["n2"]) is None
    assert cap(error_class="gpu_error", nodes_blamed=["n2"]) is not None
    assert cap(error_class="gpu_unavailable", nodes_excluded=["n2"]) is not None


# -- with Slurm ---------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm() -> FakeSlurm:
    slurm = FakeSlurm(known_partitions=[PartitionInfo(name="gpu", default=True, nodes=4)])
    slurm.jobs["45"] = JobInfo(
        job_id="45", state=JobState.RUNNING, partition="gpu", nodes="n[1-2]", excluded_nodes="n4"
    )
    return slurm


@pytest.fixture
def allocation(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> SlurmAllocation:
    monkeypatch.setenv("SLURM_JOB_ID", "45")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return SlurmAllocation(slurm)  # type: ignore[arg-type]


@pytest.mark.parametrize(("needed", "left_out"), [(1, ["n1", "n2"]), (2, ["n1"]), (3, [])])
def test_node_is_dispensable_only_if_the_partition_has_enough_others(
    allocation: SlurmAllocation, needed: int, left_out: list[str]
) -> None:
    assert allocation.dispensable(["n1", "n2"], needed=needed) == left_out


def test_node_required_by_the_user_is_not_dispensable(slurm: FakeSlurm, allocation: SlurmAllocation) -> None:
    slurm.move("45", JobState.RUNNING, required_nodes="n1")
    assert allocation.dispensable(["n1", "n2"], needed=1) == ["n2"]


def test_requeue_updates_slurms_list_of_excluded_nodes(slurm: FakeSlurm, allocation: SlurmAllocation) -> None:
    slurm.move("45", JobState.RUNNING, excluded_nodes="n[3-4]")
    allocation.avoid(["n2"], instead_of=["n2", "n3"])  # our exclusion of n3 has expired; the user excluded n4
    allocation.requeue()
    assert slurm.requeued == ["45"]
    assert slurm.jobs["45"].excluded_nodes == "n2,n4"


def test_requeue_without_exclusions_does_not_update_slurm(slurm: FakeSlurm, allocation: SlurmAllocation) -> None:
    allocation.avoid([], instead_of=[])
    allocation.requeue()
    assert "exclude" not in slurm.calls


def test_failed_exclusion_in_slurm_is_only_logged(
    allocation: SlurmAllocation, caplog: pytest.LogCaptureFixture
) -> None:
    allocation.avoid(["n1"], instead_of=["n1"], now=True)  # the job still runs
    assert "cannot change the excluded nodes of job 45 (nodes that hpcaccel wants to exclude: n1): " in caplog.text


def test_exclusion_in_a_chain_updates_the_pending_jobs(
    run: RunDir, slurm: FakeSlurm, allocation: SlurmAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job_id in ("46", "47"):
        slurm.jobs[job_id] = JobInfo(job_id=job_id, state=JobState.PENDING, partition="gpu", excluded_nodes="n4")
    write_json(run.record, {"job_ids": ["45"], "links": ["45", "46", "47"]})
    chained = ChainedAllocation(run, limits(chain=5), slurm)  # type: ignore[arg-type]
    chained.avoid(["n2"], instead_of=["n2"])
    assert chained.requeue() == ""
    assert [slurm.jobs[job_id].excluded_nodes for job_id in ("46", "47")] == ["n2,n4", "n2,n4"]


# -- placement of the ranks ---------------------------------------------------------------------------------------


class Nodes:
    """An allocation of four nodes, of which n1 and n2 are dispensable."""

    nodes = ["n1", "n2", "n3", "n4"]  # noqa: RUF012

    def dispensable(self, nodes: list[str], *, needed: int) -> list[str]:
        return [node for node in nodes if node in ("n1", "n2")]


def placement(run: RunDir, *, nodes: int, setup: list[str] | None = None, **changes: Any) -> Placement:
    launch = LaunchSpec(
        kind="program", program=[], workdir="/", backend="slurm", nodes=nodes, ranks_per_node=1, stop="cooperative",
        setup_per_node=setup or [], resilience=limits(**changes),
    )  # fmt: skip
    return Placement(run, launch, Nodes())  # type: ignore[arg-type]


def test_ranks_are_placed_on_nodes_that_are_not_excluded(run: RunDir) -> None:
    place = placement(run, nodes=3)
    assert (place.nodes, place.others) == (["n1", "n2", "n3"], ["n4"])
    place.exclude(["n2"], why="gpu_error", detail="", attempt=1)
    assert (place.nodes, place.others, place.misplaced()) == (["n1", "n3", "n4"], ["n2"], [])


def test_all_nodes_are_used_if_too_few_are_left_and_job_may_leave_once(run: RunDir) -> None:
    place = placement(run, nodes=4)
    place.exclude(["n2"], why="gpu_error", detail="", attempt=1)
    assert (place.nodes, place.misplaced()) == (Nodes.nodes, ["n2"])
    assert not placement(run, nodes=4, requeue=False).worth_leaving(["n2"])
    assert place.worth_leaving(["n2"])
    assert not place.worth_leaving(["n2"])
    assert not place.worth_leaving(["n3"])


@pytest.mark.parametrize(
    ("nodes", "setup", "blamed", "excludable", "spare"),
    [
        (3, None, ["n3"], ("n3",), True),
        (3, ["true"], ["n2"], ("n2",), False),  # setup has not run on the spare node
        (4, None, ["n1"], ("n1",), False),
        (4, None, ["n3"], (), False),
        (4, None, [], (), False),
        (1, None, ["n1", "n2", "n3"], ("n1", "n2"), True),  # max_excluded
    ],
)
def test_which_nodes_may_be_excluded(
    run: RunDir, nodes: int, setup: list[str] | None, blamed: list[str], excludable: tuple[str, ...], spare: bool
) -> None:
    assert placement(run, nodes=nodes, setup=setup).excludable(blamed) == (excludable, spare)


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Job 45 on three nodes, in whose batch step this process is."""
    monkeypatch.setenv("SLURM_JOB_ID", "45")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    slurm = FakeSlurm()
    slurm.jobs["45"] = JobInfo(job_id="45", state=JobState.RUNNING, nodes="n[1-3]")
    return slurm


@pytest.mark.parametrize(
    ("state", "nodes", "restarts", "left"),
    [
        (JobState.RUNNING, "n[1-3]", 0, ["n1", "n2", "n3"]),
        (JobState.RUNNING, "n[1,3]", 0, ["n1", "n3"]),
        (JobState.COMPLETING, "n1", 0, ["n1", "n2", "n3"]),  # the job ends on one node after the other
        (JobState.RUNNING, "n[4-6]", 1, ["n1", "n2", "n3"]),  # already the next start
        (JobState.RUNNING, "", 0, ["n1", "n2", "n3"]),
    ],
)
def test_running_job_loses_nodes(
    in_job: FakeSlurm, state: JobState, nodes: str, restarts: int, left: list[str]
) -> None:
    allocation = SlurmAllocation(in_job)  # type: ignore[arg-type]
    in_job.jobs["45"] = JobInfo(job_id="45", state=state, nodes=nodes, restarts=restarts)
    allocation.status()
    assert allocation.nodes == left


def test_spare_node_takes_the_place_of_a_lost_one(run: RunDir, in_job: FakeSlurm) -> None:
    allocation = SlurmAllocation(in_job)  # type: ignore[arg-type]
    launch = LaunchSpec(
        kind="program", program=["x"], workdir="/", backend="slurm", nodes=2, ranks_per_node=1, stop="signals",
        setup_per_node=["true"], resilience=limits(spare_nodes=1),
    )  # fmt: skip
    placement = Placement(run, launch, allocation)
    before = placement.nodes
    assert (before, placement.others, placement.lost(before)) == (["n1", "n2"], ["n3"], [])
    in_job.jobs["45"] = JobInfo(job_id="45", state=JobState.RUNNING, nodes="n[1,3]")
    allocation.status()
    assert placement.lost(before) == ["n2"]
    assert placement.excludable(["n2"]) == (("n2",), True)
    assert (placement.nodes, placement.others, placement.is_complete) == (["n1", "n3"], ["n2"], True)
    in_job.jobs["45"] = JobInfo(job_id="45", state=JobState.RUNNING, nodes="n1")
    allocation.status()
    assert not placement.is_complete


@pytest.mark.parametrize(
    ("sizes", "count", "used"),
    [
        ([], 2, None), ([], 3, 3), ([], 5, 3),
        ([[3, 5, 1]], 2, None), ([[3, 5, 1]], 4, 4), ([[3, 5, 1]], 9, 5),
        ([[1, 1, 1], [4, 8, 2]], 3, 1), ([[1, 1, 1], [4, 8, 2]], 7, 6), ([[1, 1, 1], [4, 8, 2]], 20, 8),
    ],
)  # fmt: skip
def test_ranks_use_the_largest_allowed_number_of_nodes(sizes: list[list[int]], count: int, used: int | None) -> None:
    launch = LaunchSpec(
        kind="program", program=["x"], workdir="/", backend="slurm", nodes=3, node_sizes=sizes, ranks_per_node=1,
        stop="signals",
    )  # fmt: skip
    assert launch.size_for(count) == used


def test_ranks_of_a_job_that_may_shrink_go_on_with_the_nodes_that_are_left(run: RunDir, in_job: FakeSlurm) -> None:
    allocation = SlurmAllocation(in_job)  # type: ignore[arg-type]
    launch = LaunchSpec(
        kind="program", program=["x"], workdir="/", backend="slurm", nodes=2, node_sizes=[[2, 3, 1]], ranks_per_node=1,
        stop="signals", resilience=limits(on_node_loss="shrink"),
    )  # fmt: skip
    placement = Placement(run, launch, allocation)
    assert (placement.nodes, placement.others) == (["n1", "n2", "n3"], [])
    in_job.jobs["45"] = JobInfo(job_id="45", state=JobState.RUNNING, nodes="n[1,3]")
    allocation.status()
    assert placement.excludable(["n2"]) == (("n2",), True)
    assert (placement.nodes, placement.is_complete) == (["n1", "n3"], True)
    assert placement.excludable(["n3"])[1] is False


def test_watch_of_the_batch_host_is_on_another_node(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ranks if possible; a job whose ranks use one node has only its spare node for this."""
    calls = tmp_path / "calls"
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec sleep 60\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    launch = LaunchSpec(
        kind="program", program=["x"], workdir="/", backend="slurm", nodes=1, ranks_per_node=1, stop="signals",
        resilience=limits(spare_nodes=1),
    )  # fmt: skip
    for nodes, ranks, expected in ((["n1", "n2", "n3"], 2, "n2"), (["n1", "n2"], 1, "n2")):
        allocation = SimpleNamespace(nodes=nodes, job_id="45", restart_count=0, jobs=("45",))
        job = Job(
            run=run, launch=replace(launch, nodes=ranks), allocation=allocation, ledger=Ledger.of(run),
            scheduler=SchedulerView(allocation),
        )  # type: ignore[arg-type]  # fmt: skip
        for _ in range(2):
            job.watch_batch_host()
        assert job.host_watch is not None
        assert job.host_watch._process is not None
        while not (calls.exists() and calls.read_text().endswith("\n")):
            time.sleep(0.01)
        job.host_watch._process.kill()
        job.host_watch._process.wait()
        [line] = calls.read_text().splitlines()
        assert f"--nodelist={expected} --overlap" in line
        assert line.endswith(f"watch-batch-host {run.path} 45 0")
        calls.unlink()


def test_nothing_is_watched_in_jobs_that_end_with_a_node(run: RunDir) -> None:
    allocation = SimpleNamespace(nodes=["n1", "n2"], job_id="45", restart_count=0, jobs=("45",))
    launch = LaunchSpec(
        kind="program", program=["x"], workdir="/", backend="slurm", nodes=2, ranks_per_node=1, stop="signals"
    )
    job = Job(run=run, launch=launch, allocation=allocation, ledger=Ledger.of(run), scheduler=SchedulerView(allocation))  # type: ignore[arg-type]
    assert job.host_watch is None
