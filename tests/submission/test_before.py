"""Plan, debug jobs, changes since the last run, explain and allocations, with an in-memory Slurm."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.records import AttemptEnd, ExcludedNode, to_dict
from hpcaccel.errors import ClusterError, SpecError, UserError
from hpcaccel.slurm.parsing import StartEstimate, WaitingJob, parse_estimate, parse_waiting
from hpcaccel.slurm.states import JobInfo, JobState
from hpcaccel.spec import load_spec
from hpcaccel.spec.cluster.cluster_facts import SiteFacts
from hpcaccel.submission.clusters.plan import debug_job, plan_choices, plan_jobs
from hpcaccel.submission.runs.explain import explain_run
from hpcaccel.submission.runs.run_handle import Run
from hpcaccel.submission.runs.status import status
from hpcaccel.submission.submit.comparison import changes_since_last
from hpcaccel.submission.submit.prepare import prepare
from hpcaccel.submission.submit.salloc import SallocAllocation, allocation_around, overrides_inside, prepared_inside


def test_start_estimates_and_waiting_jobs_are_parsed() -> None:
    old = "sbatch: Job 49 to start at 2026-11-20T23:06:21 using 3 processors on nodes n[1-3] in partition gpu\n"
    new = "sbatch: Job 7 to start at 2026-11-20T23:06:21 a using 3 processors on nodes n[1-3] in partition gpu\n"
    estimates = {parse_estimate(old), parse_estimate(new)}
    (estimate,) = estimates
    assert estimate is not None
    assert (estimate.nodes, estimate.partition) == ("n[1-3]", "gpu")
    assert estimate.start_time is not None
    assert parse_estimate("allocation failure: Requested node configuration is not available") is None
    text = "slurm_load: warning\n46_[1-5%2]|90|me|2|gpu,spot|5:00|N/A|afterok:45(unfulfilled)|PENDING|Dependency\n"
    (job,) = parse_waiting(text + "x|y\n")
    assert (job.job_id, job.priority, job.node_count, job.partitions) == ("46_[1-5%2]", 90, 2, ("gpu", "spot"))
    assert (job.time_limit_seconds, job.start_time, job.dependency) == (300, None, "afterok:45(unfulfilled)")


# -- plan -----------------------------------------------------------------------------------------------------------


def test_plan_queries_every_combination_of_partition_and_nodes(project: Any) -> None:
    project.slurm.estimate = StartEstimate(start_time=time.time() + 3600, partition="a")
    found = plan_choices(
        project.path / "job.yaml",
        partitions=["a", "b"],
        nodes=["2", "4"],
        overrides=["slurm.gpus_per_node=4", "slurm.time=30"],
        slurm=project.slurm,
    )
    assert {(one.partition, one.nodes) for one in found} == {("a", 2), ("a", 4), ("b", 2), ("b", 4)}
    assert {one.gpu_hours for one in found} == {4.0, 8.0}
    assert all(one.waits_seconds is not None and 3500 < one.waits_seconds <= 3600 for one in found)
    assert sorted(text.count("--nodes=4") for text in project.slurm.tested) == [0, 0, 1, 1]
    assert project.slurm.submissions == []
    assert project.left() == []


def test_plan_reports_why_slurm_would_refuse_a_job(project: Any) -> None:
    project.slurm.refuse = "Requested node configuration is not available"
    (one,) = plan_choices(project.path / "job.yaml", partitions=[], nodes=[], slurm=project.slurm)
    assert (one.start_time, "node configuration" in one.problem) == (None, True)


def test_plan_does_not_query_combinations_that_facts_forbid(project: Any) -> None:
    facts = SiteFacts.model_validate(
        {"name": "c", "probed_at": 1.0, "slurm_version": "22.05", "partitions": [{"name": "a", "nodes": 2}]}
    )
    found = plan_choices(
        project.path / "job.yaml", partitions=["a"], nodes=["1", "8"], facts=facts, slurm=project.slurm
    )
    assert [bool(one.problem) for one in found] == [False, True]
    assert len(project.slurm.tested) == 1


def test_plan_refuses_too_many_combinations_and_invalid_nodes(project: Any) -> None:
    with pytest.raises(UserError, match="42 combinations are too many"):
        plan_choices(project.path / "job.yaml", partitions=list("abcdefg"), nodes=list("123456"), slurm=project.slurm)
    with pytest.raises(SpecError, match="--nodes 'many'"):
        plan_choices(project.path / "job.yaml", partitions=[], nodes=["many"], slurm=project.slurm)


def test_plan_covers_each_job_of_a_jobs_file(project: Any) -> None:
    jobs = (
        "slurm: {time: 60}\njobs:\n  a: {entrypoint: {command: [x]}, after: [b]}\n  b: {entrypoint: {command: [x]}}\n"
    )
    file = project.write("jobs.yaml", jobs)
    found = plan_jobs(file, partitions=["p", "q"], nodes=[], overrides=["a.slurm.nodes=2"], slurm=project.slurm)
    assert [(one.job, one.nodes) for one in found] == [("b", 1), ("b", 1), ("a", 2), ("a", 2)]
    with pytest.raises(UserError, match="42 combinations"):
        plan_jobs(file, partitions=list("abcdefg"), nodes=list("123"), slurm=project.slurm)


def test_prepare_for_an_ssh_cluster_points_to_the_command_line(project: Any, home: Path) -> None:
    folder = home / "config" / "hpcaccel" / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "alps.yaml").write_text("host: me@alps\n")
    with pytest.raises(UserError, match="hpcaccel submit FILE --cluster alps"):
        prepare("job.yaml", cluster="alps", slurm=project.slurm)


# -- debug ----------------------------------------------------------------------------------------------------------

SITE: dict[str, Any] = {"name": "c", "probed_at": 1.0, "slurm_version": "22.05"}


def debugged(project: Any, *own: str, **site: Any) -> tuple[Any, str]:
    spec = load_spec(project.path / "job.yaml", overrides=["slurm.nodes=4", "slurm.time=5:00:00"])
    job = debug_job(spec, SiteFacts.model_validate({**SITE, **site}))
    final = load_spec(project.path / "job.yaml", overrides=[*job.overrides, *own])
    return final, job.note(final)


def test_debug_job_is_small_and_uses_the_debug_partition(project: Any) -> None:
    partitions = [{"name": "gpu"}, {"name": "debugging"}, {"name": "gpu-debug", "max_time_minutes": 10}]
    spec, note = debugged(project, partitions=partitions)
    assert (spec.name, spec.slurm.nodes, spec.slurm.time) == ("demo-debug", "1", "00:10:00")
    assert (spec.slurm.partition, spec.resilience.requeue) == ("gpu-debug", False)
    assert note == "debugging: one node, at most 00:10:00, in partition 'gpu-debug', not requeued"
    _, note = debugged(project, "slurm.time=30", "slurm.nodes=2", partitions=partitions)
    assert note.startswith("debugging: 2 nodes, at most 00:30:00, in partition 'gpu-debug'")


def test_debug_job_uses_debug_qos_without_a_usable_partition(project: Any) -> None:
    closed = [{"name": "debug", "state": "DOWN"}, {"name": "test", "allow_accounts": ["others"]}]
    accounts = [{"account": "ml", "default": True, "qos": ["normal", "debug"]}]
    spec, _ = debugged(project, partitions=closed, accounts=accounts)
    assert (spec.slurm.partition, spec.slurm.qos, spec.slurm.time) == (None, "debug", "00:15:00")
    spec, note = debugged(project)
    assert spec.slurm.qos is None
    assert "the cluster's facts list no partition or QOS for debugging that you can use" in note


# -- changes --------------------------------------------------------------------------------------------------------


def test_changes_since_last_run_list_settings_files_and_diff(project: Any) -> None:
    first = prepare("job.yaml", cluster="slurm", slurm=project.slurm)
    assert changes_since_last(first) is None
    run = project.queue()
    same = changes_since_last(prepare("job.yaml", cluster="slurm", slurm=project.slurm))
    assert same is not None
    assert (same.run_id, same.nothing) == (run.run_id, True)
    project.write("train.py", (project.path / "train.py").read_text() + "print('new')\n")
    project.write("model.py", "depth = 3\n")
    overrides = ["args.lr=1e-3", "slurm.time=20"]
    found = changes_since_last(prepare("job.yaml", cluster="slurm", overrides=overrides, slurm=project.slurm))
    assert found is not None
    assert {one.key: (one.before, one.now) for one in found.settings} == {
        "entrypoint.args.lr": (3.0e-4, 1e-3),
        "slurm.time": ("00:10:00", "00:20:00"),
    }
    assert (found.added, found.removed, found.changed) == (("model.py",), (), ("train.py",))
    assert "+print('new')" in found.diff


def test_changes_without_a_code_copy_compare_settings_only(project: Any) -> None:
    project.queue("code.copy=false")
    found = changes_since_last(prepare("job.yaml", cluster="slurm", slurm=project.slurm))
    assert found is not None
    assert "the last run has no copy of its code" in found.code
    assert [one.key for one in found.settings] == ["code.copy"]


# -- explain --------------------------------------------------------------------------------------------------------


def test_waiting_run_is_explained_by_its_reason_and_jobs_ahead(project: Any) -> None:
    run = project.queue()
    start = time.time() + 7200
    project.slurm.move(run.job_id, JobState.PENDING, reason="Priority", start_time=start)
    own = WaitingJob(job_id=run.job_id, priority=50, partitions=("gpu",), start_time=start)
    above = WaitingJob(job_id="7", priority=90, user="eve", node_count=4, partitions=("gpu",), reason="Resources")
    project.slurm.others = [
        own,
        above,
        replace(above, job_id="8", priority=40),
        replace(above, job_id="9", held=True),
        replace(above, job_id="10", partitions=("cpu",)),
        replace(above, job_id="11", reason="Dependency"),
        replace(above, job_id="12_[1-3]", priority=50),
        replace(above, job_id="900", priority=50),
    ]
    found = explain_run(run.dir, project.slurm)
    assert (found.state, found.why[0].reason, found.why[0].waits) == ("pending", "Priority", True)
    assert found.start_time == start
    assert ([one.job_id for one in found.before], found.nodes_before, found.priority) == (["7", "12_[1-3]"], 8, 50)


def test_explain_prefers_the_controller_to_the_cached_state(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = project.queue()
    shared = status(run.dir, project.slurm)
    monkeypatch.setattr("hpcaccel.submission.runs.explain.status", lambda *_: replace(shared, reason="Resources"))
    project.slurm.move(run.job_id, JobState.PENDING, reason="JobHeldUser")
    (why,) = explain_run(run.dir, project.slurm).why
    assert (why.reason, why.advice) == ("JobHeldUser", f"release it: scontrol release {run.job_id}")
    project.slurm.move(run.job_id, JobState.RUNNING, reason="")
    found = explain_run(run.dir, project.slurm)
    assert (found.state, found.why, found.detail) == ("starting", (), "its nodes have just been allocated")


def test_explain_names_the_nodes_that_the_run_excludes(project: Any) -> None:
    run = project.queue()
    project.slurm.move(run.job_id, JobState.PENDING, reason="ReqNodeNotAvail, UnavailableNodes:n3")
    now = time.time()
    failed = ExcludedNode(node="n1", why="node_failure", detail="", time=now, attempt=1, expires=now + 60)
    nodes = [to_dict(one) for one in (failed, replace(failed, node="n2"), replace(failed, node="n9", expires=now - 1))]
    write_json(run.dir.excluded_nodes, {"version": 1, "nodes": nodes})
    found = explain_run(run.dir, project.slurm)
    assert found.detail.startswith("it excludes n[1-2] after failures, see ")
    assert found.advice.endswith(f"scontrol update JobId={run.job_id} ExcNodeList=")


def test_unsatisfiable_dependency_is_explained(project: Any) -> None:
    run = project.queue()
    project.slurm.move(run.job_id, JobState.PENDING, reason="DependencyNeverSatisfied")
    assert "it will not start on its own" in status(run.dir, project.slurm).detail
    (why,) = explain_run(run.dir, project.slurm).why
    assert (why.waits, "can never satisfy" in why.words) == (False, True)
    append_line(run.dir.ledger, ending(error_class="dependency", detail="afterok: run x failed", advice="Resume x."))
    project.slurm.move(run.job_id, JobState.CANCELLED)
    found = explain_run(run.dir, project.slurm)
    assert (found.state, found.detail, found.advice) == ("cancelled", "afterok: run x failed", "Resume x.")


@pytest.mark.parametrize("state", [JobState.REQUEUE_HOLD, JobState.PENDING])
def test_job_left_in_the_queue_after_its_run_ended_is_reported(project: Any, state: JobState) -> None:
    run = project.queue()
    append_line(run.dir.ledger, ending(reason="failed", detail="rank 0: KeyError: 'lr'"))
    project.slurm.move(run.job_id, state, reason="JobHeldUser")
    found = explain_run(run.dir, project.slurm)
    assert found.state == "failed"
    assert found.detail == f"rank 0: KeyError: 'lr'; job {run.job_id} is still in the queue (held, JobHeldUser)"
    assert found.advice.startswith(f"remove it from the queue: hpcaccel cancel {run.run_id}; resume it")


def ending(**more: Any) -> dict[str, Any]:
    return {**to_dict(AttemptEnd(attempt=1, time=time.time(), reason="cancelled", decision="end")), **more}


def test_cancelled_run_is_explained_with_advice_to_resume(project: Any) -> None:
    run = project.queue()
    project.slurm.move(run.job_id, JobState.CANCELLED)
    found = explain_run(run.dir, project.slurm)
    assert (found.state, found.why, "hpcaccel resume" in found.advice) == ("cancelled", (), True)


# -- inside an allocation -------------------------------------------------------------------------------------------

INSIDE = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "16(x2)"}


def test_allocation_is_read_from_the_shell_environment() -> None:
    assert allocation_around(INSIDE) == SallocAllocation(job_id="9", nodes=("n1", "n2"), cpus_per_node=(16, 16))
    with pytest.raises(UserError, match="salloc"):
        allocation_around({})
    with pytest.raises(UserError, match="one rank of a job"):
        allocation_around({**INSIDE, "HPCACCEL_RUN_DIR": "/x"})


HETEROGENEOUS = {
    "SLURM_JOB_ID": "9", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "16(x2)", "SLURM_JOB_NODELIST_HET_GROUP_1": "n3",
}  # fmt: skip
"""Environment of salloc 22.05: all but the job id and the number of groups are set per group only."""


def test_components_need_a_heterogeneous_allocation(project: Any) -> None:
    around = allocation_around(HETEROGENEOUS)
    assert around == SallocAllocation(job_id="9", nodes=("n1", "n2"), cpus_per_node=(16, 16), components=2)
    beside = "components={data: {entrypoint: {command: [serve]}}}"
    prepared = prepare("job.yaml", cluster="slurm", overrides=["slurm.nodes=2", beside], slurm=project.slurm)
    assert prepared_inside(prepared, around, project.slurm).backend.start(prepared.run, Path("x")) == "9"
    with pytest.raises(UserError, match=r"components \(data\), which need .* Job 9 has 0 such groups"):
        prepared_inside(prepared, allocation_around(INSIDE), project.slurm)


def test_allocation_sets_nodes_time_and_partition(project: Any) -> None:
    job = JobInfo(job_id="9", state=JobState.RUNNING, partition="gpu", end_time=10_000.0)
    project.slurm.jobs["9"] = job
    around = allocation_around(INSIDE)
    settings = overrides_inside(around, project.slurm, 10_000.0 - 610)
    assert {"slurm.nodes=2", "slurm.time=10", "slurm.partition=gpu", "resilience.requeue=false"} <= set(settings)
    project.slurm.jobs["9"] = replace(job, state=JobState.COMPLETED)
    with pytest.raises(ClusterError, match="the job of this shell, 9, is no longer running"):
        overrides_inside(around, project.slurm, 0.0)


def test_run_inside_an_allocation_submits_no_job(project: Any) -> None:
    from hpcaccel.submission.submit.api import submit_prepared

    around = allocation_around(INSIDE)
    prepared = prepare("job.yaml", cluster="slurm", overrides=["slurm.nodes=2"], slurm=project.slurm)
    run = submit_prepared(prepared_inside(prepared, around, project.slurm))
    assert isinstance(run, Run)
    assert run.job_id == "9"
    assert project.slurm.submissions == []
    wide = prepare("job.yaml", cluster="slurm", overrides=["slurm.cpus_per_task=9"], slurm=project.slurm)
    with pytest.raises(UserError, match=r"18 CPUs \(2 x 9\), but job 9 has only 16"):
        prepared_inside(wide, around, project.slurm)


def test_spec_that_contradicts_stored_facts_is_refused(project: Any, home: Path) -> None:
    from hpcaccel.spec.cluster.cluster_facts import store_facts

    folder = home / "config" / "hpcaccel" / "clusters"
    folder.mkdir(parents=True)
    (folder / "c.yaml").write_text("backend: slurm\n")
    store_facts(SiteFacts.model_validate({**SITE, "partitions": [{"name": "gpu"}]}))
    with pytest.raises(SpecError, match="'gpux' is not on cluster 'c'"):
        prepare("job.yaml", cluster="c", overrides=["slurm.partition=gpux"], slurm=project.slurm)
    unheld = prepare("job.yaml", cluster="c", overrides=["slurm.partition=gpux"], slurm=project.slurm, facts=False)
    assert "--partition=gpux" in unheld.script
