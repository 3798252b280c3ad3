"""Tests of the decision at the end of an attempt: its reason, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from hpcaccel.core.rank_records import Outcome
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.node.allocation import JobStatus
from hpcaccel.node.decision import Evidence, decide
from hpcaccel.node.failures import Failure, cause

RUNNING = JobStatus(running=True)
IN_GRACE = JobStatus(running=True, preempted=True)
NO_GRACE = JobStatus(running=False, will_requeue=True)
NODE_FAILURE = JobStatus(running=False, will_requeue=True, failed_nodes=("n2",))
CANCELLED_IN_GRACE = JobStatus(running=False, preempted=True)
TAKEN_DOWN = JobStatus(running=False)
PREEMPTED_FOR_GOOD = JobStatus(running=False, termination_reason="preempted")
OUT_OF_TIME = JobStatus(running=False, termination_reason="time_limit")
OUT_OF_TIME_AND_REQUEUEABLE = JobStatus(running=False, termination_reason="time_limit", requeueable=True)
OUT_OF_TIME_IN_A_CHAIN = JobStatus(running=False, will_requeue=True, termination_reason="time_limit")
UNKNOWN = JobStatus(running=False, known=False)

DONE = Outcome(reason="completed", step=10)
SAVED = Outcome(reason="stop", step=7, checkpoint="step_00000007", resume=True)


def stop(then: str, reason: str = "stop") -> StopRequest:
    return StopRequest(reason=reason, then=then, time=0.0)  # type: ignore[arg-type]


def failed(name: str, *nodes: str) -> Failure:
    return Failure(cause=cause(name), detail="words", nodes=list(nodes))


def seen(**changes: Any) -> Evidence:
    defaults: dict[str, Any] = {
        "exit_code": 0,
        "outcome": None,
        "stop": None,
        "status": RUNNING,
        "cancel_requested": False,
        "can_requeue": True,
        "restarts_left": 1,
    }
    return Evidence(**{**defaults, **changes})


@pytest.mark.parametrize(
    ("what", "reason", "decision", "by_scheduler"),
    [
        (seen(), "completed", "end", False),
        (seen(outcome=DONE), "completed", "end", False),
        (seen(outcome=DONE, exit_code=143, status=TAKEN_DOWN), "completed", "end", False),
        (seen(outcome=DONE, exit_code=1), "failed", "restart", False),
        (seen(outcome=SAVED, exit_code=137, status=IN_GRACE), "preempted", "requeue", False),
        (seen(outcome=SAVED, exit_code=143, status=NO_GRACE), "preempted", "requeue", True),
        (seen(exit_code=143, status=NO_GRACE), "preempted", "requeue", True),
        (seen(outcome=SAVED, stop=stop("pause"), status=NO_GRACE), "preempted", "pause", True),
        (seen(outcome=SAVED, stop=stop("pause"), status=IN_GRACE), "preempted", "pause", False),
        (seen(exit_code=1, status=NODE_FAILURE), "lost", "requeue", True),
        (seen(exit_code=0, status=NODE_FAILURE), "lost", "requeue", True),  # srun lost its nodes
        (seen(exit_code=1, failure=failed("launch")), "failed", "requeue", False),
        (seen(exit_code=1, failure=failed("launch"), can_requeue=False), "failed", "restart", False),
        (seen(exit_code=1, failure=failed("step_memory")), "failed", "restart", False),
        (seen(exit_code=1, failure=failed("step_memory"), restarts_left=0), "failed", "requeue", False),
        (seen(exit_code=0, status=NO_GRACE), "preempted", "requeue", True),
        # A program without an outcome may have saved and exited with 0 after a signal of Slurm.
        (seen(exit_code=0, status=IN_GRACE), "preempted", "requeue", False),
        (seen(exit_code=0, status=IN_GRACE, can_requeue=False), "preempted", "pause", False),
        (seen(exit_code=0, status=IN_GRACE, stop=stop("requeue", "preempted")), "preempted", "requeue", False),
        (seen(exit_code=0, status=IN_GRACE, stop=stop("finish")), "completed", "end", False),
        (seen(exit_code=0, status=IN_GRACE, cancel_requested=True), "cancelled", "end", False),
        (seen(exit_code=0, status=IN_GRACE, results=True), "completed", "end", False),
        (seen(exit_code=0, status=IN_GRACE, outcome=DONE), "completed", "end", False),
        (seen(exit_code=0, status=PREEMPTED_FOR_GOOD), "preempted", "pause", False),
        (seen(exit_code=0, status=OUT_OF_TIME), "time_limit", "pause", False),
        (seen(exit_code=0, status=OUT_OF_TIME_AND_REQUEUEABLE), "time_limit", "requeue", False),
        (seen(outcome=SAVED, status=OUT_OF_TIME_AND_REQUEUEABLE), "time_limit", "requeue", False),
        (seen(status=OUT_OF_TIME_AND_REQUEUEABLE, stop=stop("pause")), "time_limit", "pause", False),
        (seen(status=OUT_OF_TIME_AND_REQUEUEABLE, can_requeue=False), "time_limit", "pause", False),
        (seen(status=OUT_OF_TIME_AND_REQUEUEABLE, cancel_requested=True), "cancelled", "end", False),
        (seen(exit_code=0, status=OUT_OF_TIME_IN_A_CHAIN), "time_limit", "requeue", True),
        (seen(exit_code=0, status=TAKEN_DOWN), "cancelled", "end", False),
        (seen(exit_code=0, status=TAKEN_DOWN, results=True), "completed", "end", False),
        (seen(exit_code=0, status=UNKNOWN), "completed", "end", False),
        (seen(outcome=SAVED, stop=stop("requeue", "preempted"), status=NODE_FAILURE), "lost", "requeue", True),
        (seen(outcome=SAVED, exit_code=143, status=TAKEN_DOWN), "cancelled", "end", False),
        (seen(outcome=SAVED, status=IN_GRACE, cancel_requested=True), "cancelled", "end", False),
        (seen(outcome=SAVED, status=CANCELLED_IN_GRACE), "cancelled", "end", False),
        (seen(outcome=SAVED, stop=stop("requeue", "time_limit")), "time_limit", "requeue", False),
        (seen(outcome=SAVED, stop=stop("requeue")), "stop", "requeue", False),
        (seen(outcome=SAVED, stop=stop("pause")), "stop", "pause", False),
        (seen(outcome=SAVED, stop=stop("requeue"), can_requeue=False), "stop", "pause", False),
        (seen(outcome=SAVED, exit_code=85), "stop", "requeue", False),
        (seen(outcome=SAVED, stop=stop("requeue"), status=UNKNOWN), "stop", "requeue", False),
        (seen(stop=stop("requeue"), exit_code=143), "stop", "requeue", False),
        (seen(stop=stop("requeue"), exit_code=0), "stop", "requeue", False),
        (seen(stop=stop("finish"), exit_code=0), "completed", "end", False),
        (seen(outcome=DONE, stop=stop("finish", "pruned")), "pruned", "end", False),
        (seen(outcome=SAVED, stop=stop("pause", "pruned"), exit_code=85), "pruned", "end", False),
        (seen(stop=stop("finish", "pruned"), exit_code=0), "pruned", "end", False),
        (seen(stop=stop("finish", "pruned"), exit_code=143), "pruned", "end", False),
        (seen(stop=stop("finish", "pruned"), exit_code=1, failure=failed("exception")), "pruned", "end", False),
        (seen(stop=stop("finish", "pruned"), outcome=SAVED, status=NO_GRACE), "pruned", "end", False),
        (seen(stop=stop("finish", "pruned"), exit_code=137, cancel_requested=True), "pruned", "end", False),
        (seen(exit_code=1), "failed", "restart", False),
        (seen(exit_code=1, restarts_left=0), "failed", "requeue", False),
        (seen(exit_code=1, restarts_left=0, can_requeue=False), "failed", "end", False),
        (seen(exit_code=2, failure=failed("user_mistake")), "failed", "end", False),
        (seen(exit_code=1, status=UNKNOWN), "failed", "restart", False),
    ],
)
def test_reason_and_decision_follow_from_the_evidence(
    what: Evidence, reason: str, decision: str, by_scheduler: bool
) -> None:
    verdict = decide(what)
    assert (verdict.reason, verdict.decision, verdict.by_scheduler) == (reason, decision, by_scheduler)


BROKEN = failed("gpu_error", "n2")


@pytest.mark.parametrize(
    ("what", "decision", "exclude"),
    [
        (seen(exit_code=1, failure=BROKEN, excludable=("n2",)), "requeue", ("n2",)),
        (seen(exit_code=1, failure=BROKEN, excludable=("n2",), spare=True), "restart", ("n2",)),
        (seen(exit_code=1, failure=BROKEN, excludable=("n2",), spare=True, restarts_left=0), "requeue", ("n2",)),
        (seen(exit_code=1, failure=failed("node_failure", "n2"), excludable=("n2",), spare=True), "restart", ("n2",)),
        (seen(exit_code=1, failure=failed("node_failure", "n2")), "restart", ()),  # no more nodes may be excluded
        (seen(exit_code=1, failure=failed("node_failure", "n2"), enough_nodes=False), "requeue", ()),
        (seen(exit_code=1, failure=BROKEN, excludable=("n2",), can_requeue=False), "restart", ()),
        (seen(exit_code=1, failure=BROKEN), "restart", ()),
        (seen(exit_code=1, failure=BROKEN, restarts_left=0), "requeue", ()),
        (seen(exit_code=1, failure=failed("network")), "requeue", ()),
        (seen(exit_code=1, failure=failed("network"), can_requeue=False), "restart", ()),
        (seen(exit_code=1, failure=failed("hang", "n2"), excludable=("n2",)), "restart", ()),
        (seen(exit_code=1, failure=failed("import_error")), "end", ()),
        (seen(exit_code=1, status=NODE_FAILURE, excludable=("n2",)), "requeue", ("n2",)),
        (seen(exit_code=1, status=IN_GRACE, failure=BROKEN, excludable=("n2",)), "requeue", ()),
    ],
)  # fmt: skip
def test_decision_and_excluded_nodes_follow_from_the_cause(
    what: Evidence, decision: str, exclude: tuple[str, ...]
) -> None:
    verdict = decide(what)
    assert (verdict.decision, verdict.exclude) == (decision, exclude)


def test_verdict_has_the_cause_its_nodes_and_advice() -> None:
    verdict = decide(seen(exit_code=1, failure=BROKEN, excludable=("n2",)))
    assert (verdict.error_class, verdict.detail, verdict.nodes_blamed) == ("gpu_error", "words", ("n2",))
    assert verdict.advice == cause("gpu_error").advice


def test_detail_refers_to_the_programs_own_save_without_a_checkpoint() -> None:
    ours = decide(seen(exit_code=143, status=NO_GRACE))
    assert ours.detail.endswith("the last checkpoint remains")
    own = decide(seen(exit_code=143, status=NO_GRACE, has_checkpoint=False))
    assert own.detail.endswith("the ranks exited without reporting a result; the program's own last save remains")
