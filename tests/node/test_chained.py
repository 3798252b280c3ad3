"""Tests of one job of a chain, with a fake Slurm: how it takes over and submits others, and when the chain ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, read_json, write_json
from hpcaccel.core.launch_spec import RestartPolicy
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.core.records import AttemptEnd, AttemptStart, RunRecord, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.node import chain, supervisor
from hpcaccel.node.allocation import TAKEN_DOWN
from hpcaccel.node.allocation.slurm_allocation import SlurmAllocation
from hpcaccel.node.chain import ChainedAllocation
from hpcaccel.node.ledger import Ledger
from hpcaccel.slurm.states import JobInfo, JobState
from tests.slurm.fake_slurm import FakeSlurm

from .conftest import RESILIENCE

LIMITS: dict[str, Any] = {**RESILIENCE, "chain": 6, "chain_ahead": 2}
LAUNCH: dict[str, Any] = {
    "kind": "program",
    "program": ["true"],
    "python": "python3",
    "pythonpath": [],
    "workdir": "/tmp",
    "backend": "slurm",
    "nodes": 1,
    "ranks_per_node": 1,
    "stop": "signal",
    "srun": [],
    "setup_per_node": [],
}


class Chain:
    """A chain of jobs 100 (which has ended), 101 (which starts now) and 102 (pending)."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dir = RunDir(path / "20261120-153012-4f2a")
        self.dir.create()
        self.dir.submitit.mkdir()
        self.dir.script.write_text("#!/bin/bash\n")
        self.slurm: Any = FakeSlurm()
        for _ in range(3):
            self.slurm.sbatch(self.dir.script)
        self.record(job_ids=["100"], links=["100", "101", "102"])
        self.slurm.move("101", JobState.RUNNING)
        monkeypatch.setenv("SLURM_JOB_ID", "101")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
        monkeypatch.setattr(time, "sleep", lambda _: None)

    def record(self, **fields: Any) -> None:
        record = RunRecord(run_id=self.dir.run_id, name="demo", backend="slurm", **fields)
        write_json(self.dir.record, to_dict(record))

    def before(self, state: JobState, *end: str, then: str = "") -> None:
        """Set how job 100 ended: its state in Slurm, and the end of its attempt if that was written."""
        self.slurm.move("100", state)
        append_line(self.dir.ledger, to_dict(AttemptStart(attempt=1, time=1.0, job_id="100")))
        if then:
            self.dir.attempt(1).mkdir()
            request = StopRequest(reason="stop", then=then, time=2.0)  # type: ignore[arg-type]
            write_json(self.dir.stop(1), to_dict(request))
        if end:
            line = AttemptEnd(attempt=1, time=3.0, reason=end[0], decision=end[1])  # type: ignore[arg-type]
            append_line(self.dir.ledger, to_dict(line))

    def job(self, **limits: Any) -> ChainedAllocation:
        return ChainedAllocation(self.dir, RestartPolicy(**{**LIMITS, **limits}), self.slurm)

    @property
    def ends(self) -> list[tuple[str, str]]:
        return [(line.reason, line.decision) for line in Ledger.of(self.dir).ends]

    @property
    def now(self) -> dict[str, Any]:
        return read_json(self.dir.record) or {}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    return Chain(tmp_path, monkeypatch)


# -- start of the job -----------------------------------------------------------------------------------------------


def test_chained_job_takes_over_and_submits_another(run: Chain) -> None:
    run.before(JobState.PREEMPTED, "preempted", "requeue")
    (run.dir.submitit / "101_submitted.pkl").write_bytes(b"call")
    job = run.job()
    assert job.begin()
    assert run.slurm.submissions[-1].args == ("--dependency=afterany:101:102", "--begin=now")
    assert (run.now["job_ids"], run.now["links"]) == (["100", "101"], ["100", "101", "102", "103"])
    assert list(job.jobs) == ["100", "101", "102", "103"]
    assert (run.dir.submitit / "103_submitted.pkl").read_bytes() == b"call"


def test_chain_is_not_longer_than_configured(run: Chain) -> None:
    run.before(JobState.PREEMPTED, "preempted", "requeue")
    assert run.job(chain=3).begin()
    assert len(run.slurm.submissions) == 3


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (JobState.PREEMPTED, ("preempted", "requeue")),
        (JobState.TIMEOUT, ("time_limit", "requeue")),
        (JobState.NODE_FAIL, ("lost", "requeue")),
        (JobState.FAILED, ("lost", "requeue")),
        (JobState.CANCELLED, ("cancelled", "end")),
    ],
)
def test_end_of_killed_job_is_derived_from_its_slurm_state(run: Chain, state: JobState, end: tuple[str, str]) -> None:
    run.before(state)
    assert run.job().begin() is (end[1] == "requeue")
    assert run.ends == [end]


def test_chain_continues_if_slurm_has_forgotten_the_killed_job(run: Chain) -> None:
    run.before(JobState.PREEMPTED)
    run.slurm.forget("100")
    assert run.job().begin()
    assert run.ends == [("lost", "requeue")]


def test_requested_pause_holds_although_the_job_was_killed(run: Chain) -> None:
    run.before(JobState.PREEMPTED, then="pause")
    assert not run.job().begin()
    assert run.ends == [("preempted", "pause")]


@pytest.mark.parametrize("when", ["in the queue", "after its last words", "before its ranks started"])
def test_cancel_ends_the_chain(run: Chain, when: str) -> None:
    if when == "before its ranks started":
        run.slurm.move("100", JobState.CANCELLED)
    else:
        state = JobState.PREEMPTED if when == "in the queue" else JobState.CANCELLED
        run.before(state, "preempted", "requeue")
    if when == "in the queue":
        run.record(job_ids=["100"], links=["100", "99", "101", "102"])
        run.slurm.jobs["99"] = JobInfo(job_id="99", state=JobState.CANCELLED)
    job = run.job()
    assert not job.begin()
    assert run.ends[-1] == ("cancelled", "end")
    job.end()
    assert run.slurm.cancelled == ["102"]


@pytest.mark.parametrize("end", [("completed", "end"), ("failed", "end"), ("stop", "pause"), ("cancelled", "end")])
def test_chain_that_has_ended_starts_no_ranks_and_cancels_followers(run: Chain, end: tuple[str, str]) -> None:
    run.before(JobState.COMPLETED, *end)
    job = run.job()
    assert not job.begin()
    job.end()
    assert run.ends == [end]
    assert (len(run.slurm.submissions), run.slurm.cancelled) == (3, ["102"])


def test_chain_continues_if_slurm_reports_preemption_instead_of_cancel(run: Chain) -> None:
    run.before(JobState.PREEMPTED, "cancelled", "end")
    assert run.job().begin()


def test_chain_replaced_by_a_resume_does_not_continue(run: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "NAMED_WITHIN_SECONDS", 0.0)
    run.record(job_ids=["100", "200"], links=["200", "201"])
    job = run.job()
    assert not job.begin()
    job.end()
    assert (run.ends, run.slurm.cancelled) == ([], [])


def test_job_whose_submit_command_died_begins_a_chain(run: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "NAMED_WITHIN_SECONDS", 0.0)
    run.record(job_ids=[], links=[])
    assert run.job().begin()
    assert (run.now["job_ids"], run.now["links"]) == (["101"], ["101", "103", "104"])


def test_ends_before_a_resume_do_not_count(run: Chain) -> None:
    run.before(JobState.FAILED, "stop", "pause")
    run.record(job_ids=["100", "101"], links=["101", "102"], ledger_offset=run.dir.ledger.stat().st_size)
    assert run.job().begin()


def test_jobs_that_fail_before_their_ranks_start_count_as_failures(run: Chain) -> None:
    run.slurm.move("100", JobState.FAILED)
    run.before(JobState.FAILED, "failed", "requeue")
    run.record(job_ids=["100"], links=["100", "99", "101", "102"])
    run.slurm.jobs["99"] = JobInfo(job_id="99", state=JobState.FAILED)
    job = run.job()
    assert job.begin()
    assert run.ends == [("failed", "requeue"), ("failed", "requeue")]
    assert Ledger.of(run.dir).cap(job.jobs, RestartPolicy(**LIMITS)) == "2 failures without a new checkpoint"
    assert Ledger.of(run.dir).cap(["101"], RestartPolicy(**LIMITS)) is None


# -- the following jobs ---------------------------------------------------------------------------------------------


def test_refused_sbatch_logs_the_chain_ahead_to_set(run: Chain, caplog: pytest.LogCaptureFixture) -> None:
    run.before(JobState.PREEMPTED, "preempted", "requeue")
    run.slurm.refuse = "Access/permission denied"
    job = run.job()
    assert job.begin()
    assert "set resilience.chain_ahead: 5, so that `hpcaccel submit` submits all jobs" in caplog.text
    assert job.requeue() == ""  # one is pending
    run.slurm.move("102", JobState.CANCELLED)
    assert "the chain's remaining jobs are no longer in the queue" in job.requeue()


def test_requeue_of_the_last_job_reports_the_end_of_the_chain(run: Chain) -> None:
    run.record(job_ids=["100"], links=["100", "101"])
    job = run.job(chain=2)
    assert job.begin()
    assert job.requeue() == "this was the last job of the chain (resilience.chain: 2)"


def test_last_job_submits_no_other_if_its_supervisors_were_killed(run: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    run.record(job_ids=["100"], links=["99", "100", "101"])
    write_json(run.dir.spec, {"version": 1, "spec": {"resilience": {**LIMITS, "chain": 3}}, "launch": LAUNCH})
    monkeypatch.setattr(supervisor, "current_allocation", lambda *_: run.job(chain=3))
    before = set(run.slurm.jobs)
    assert supervisor.record_killed(run.dir, "5 supervisors in a row were killed") == EXIT_CONTINUED
    assert set(run.slurm.jobs) == before
    assert run.now["links"] == ["99", "100", "101"]
    assert run.ends[-1] == ("failed", "pause")


def test_job_that_could_not_be_submitted_at_start_is_submitted_at_end(run: Chain) -> None:
    run.record(job_ids=["100"], links=["100", "101"])
    run.slurm.refuse = "busy"
    job = run.job()
    assert job.begin()
    assert "busy" in job.requeue()
    run.slurm.refuse = ""
    assert job.requeue() == ""
    assert run.now["links"][2:] == ["103", "104"]


@pytest.mark.parametrize("links", [["100", "101", "102"], ["100", "101"]])
def test_following_jobs_exclude_faulty_nodes(run: Chain, links: list[str]) -> None:
    run.record(job_ids=["100", "101"], links=links)
    job = run.job()
    job.jobs = tuple(links)
    job.avoid(["n7"], instead_of=[])
    assert job.requeue() == ""
    assert [run.slurm.jobs[job_id].excluded_nodes for job_id in run.now["links"][2:]][:1] == ["n7"]


# -- status while Slurm terminates the job ---------------------------------------------------------------------------


def down(**changes: Any) -> Callable[[Chain], None]:
    return lambda run: run.slurm.move("101", JobState.COMPLETING, **changes)


@pytest.mark.parametrize(
    ("take_down", "accounted", "termination_reason"),
    [
        (down(preempt_time=500.0, end_time=500.0), None, "preempted"),
        (down(end_time=500.0), None, None),
        (down(start_time=100.0, end_time=701.0, time_limit_seconds=600), None, "time_limit"),
        (down(preempt_time=490.0, end_time=500.0), JobState.CANCELLED, None),
        (down(preempt_time=499.0, end_time=500.0), JobState.CANCELLED, None),
        (down(preempt_time=490.0, end_time=500.0), JobState.PREEMPTED, "preempted"),
    ],
)
def test_termination_reason_of_a_completing_job(
    run: Chain,
    monkeypatch: pytest.MonkeyPatch,
    take_down: Callable[[Chain], None],
    accounted: JobState | None,
    termination_reason: str | None,
) -> None:
    take_down(run)
    monkeypatch.setattr(SlurmAllocation, "_accounted_state", lambda _: accounted)
    chained, alone = run.job().status(), SlurmAllocation(run.slurm).status()
    assert (chained.termination_reason, chained.will_requeue) == (termination_reason, termination_reason is not None)
    assert (alone.termination_reason, alone.will_requeue) == (termination_reason, False)
    if termination_reason is None:
        assert run.job().requeue() == TAKEN_DOWN


def test_possible_preemption_counts_as_preemption_only_in_a_chain(run: Chain) -> None:
    down(preempt_time=490.0, end_time=500.0)(run)  # and the accounting still has COMPLETING
    assert run.job().status().termination_reason == "preempted"
    assert SlurmAllocation(run.slurm).status().termination_reason is None


def test_chained_job_with_a_failed_node_is_lost_and_continues(run: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    down(end_time=500.0)(run)
    monkeypatch.setattr(run.slurm, "failed_nodes", lambda nodes: ["n1"])
    status = run.job().status()
    assert (status.termination_reason, status.will_requeue, status.failed_nodes) == ("lost", True, ("n1",))


def test_empty_queue_does_not_remove_following_jobs(run: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    run.before(JobState.PREEMPTED, "preempted", "requeue")
    monkeypatch.setattr(run.slurm, "queue", lambda *_, **__: {})
    job = run.job()
    assert job.begin()
    assert list(job.jobs) == ["100", "101", "102", "103"], "one more, as there were two ahead"
    assert job.requeue() == ""
    for follower in ("102", "103"):
        run.slurm.move(follower, JobState.CANCELLED)
    assert "the chain's remaining jobs are no longer in the queue" in job.requeue()
