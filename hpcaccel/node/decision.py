"""Decides how an attempt ended and what follows, as a pure function of the evidence.

``outcome.json`` takes precedence over exit codes above 128: with ``--kill-on-bad-exit`` srun kills the other ranks when
one exits with an error, and srun's own exit code is then 137 or 143. Without an outcome, exit code 0 counts as
completed unless the program may have been stopped. Any other code is a failure unless a stop or the scheduler explains
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcaccel.core.records import Decision, Reason
from hpcaccel.core.stop_requests import StopRequest, pruned
from hpcaccel.node.allocation import JobStatus
from hpcaccel.node.failures import Failure

if TYPE_CHECKING:
    from hpcaccel.core.rank_records import Outcome

__all__ = ["Evidence", "Verdict", "decide"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The input of ``decide``, collected when no rank is running."""

    exit_code: int
    outcome: Outcome | None
    stop: StopRequest | None
    status: JobStatus
    cancel_requested: bool
    """Whether a user requested a cancel, or the scheduler terminates the job and reports no other reason."""
    can_requeue: bool
    restarts_left: int
    failure: Failure | None = None
    """The cause of the failure, if the attempt failed."""
    excludable: tuple[str, ...] = ()
    """The blamed nodes that the run may exclude."""
    spare: bool = False
    """Whether the allocation has enough nodes without ``excludable``."""
    enough_nodes: bool = True
    """Whether the allocation has enough nodes for the ranks. It may have lost some."""
    has_checkpoint: bool = True
    """Whether hpcaccel has committed a checkpoint of this run. False for programs that write their own checkpoints."""
    results: bool = False
    """In a run of a Python function: whether every rank has written its result."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    reason: Reason
    decision: Decision
    by_scheduler: bool = False
    """Whether the scheduler itself requeues the job or starts the next job of its chain. A further requeue would be
    refused, or would undo a cancel."""
    error_class: str | None = None
    detail: str = ""
    advice: str = ""
    nodes_blamed: tuple[str, ...] = ()
    rank_blamed: int | None = None
    exclude: tuple[str, ...] = ()
    """Nodes to exclude from now on."""


def decide(seen: Evidence) -> Verdict:
    if pruned(seen.stop):
        # A pruned trial always ends, even if it crashed while exiting or its nodes were reclaimed.
        detail = "" if seen.outcome is None else f"at step {seen.outcome.step}"
        return Verdict(reason="pruned", decision="end", detail=detail)
    if _completed(seen):
        return Verdict(reason="completed", decision="end")
    if seen.cancel_requested:
        return Verdict(reason="cancelled", decision="end", detail=_saved(seen))
    if seen.status.known and not seen.status.running:
        # If the user has paused the run, Slurm still restarts the job, which then ends at once.
        decision: Decision = "pause" if seen.stop is not None and seen.stop.then == "pause" else "requeue"
        if seen.status.failed_nodes:
            detail = f"node failure: {', '.join(seen.status.failed_nodes)}; {_saved(seen)}"
            return Verdict(
                reason="lost",
                decision=decision,
                by_scheduler=True,
                error_class="node_failure",
                detail=detail,
                nodes_blamed=seen.status.failed_nodes,
                exclude=seen.excludable,
            )
        if seen.status.will_requeue:
            reason = seen.status.termination_reason or "preempted"
            return Verdict(reason=reason, decision=decision, by_scheduler=True, detail=_saved(seen))
        if seen.status.requeueable and seen.status.termination_reason is not None:
            return _continue(seen, seen.status.termination_reason)
        if seen.status.termination_reason is not None:
            detail = f"{_saved(seen)}; Slurm does not requeue this job (set resilience.chain to continue in a new job)"
            return Verdict(reason=seen.status.termination_reason, decision="pause", detail=detail)
        return Verdict(reason="cancelled", decision="end", detail=_saved(seen))
    if seen.status.preempted:
        return _continue(seen, "preempted")
    if seen.stop is not None:
        return _continue(seen, seen.stop.reason)
    if seen.outcome is not None and seen.outcome.resume:
        # Only the ranks received the signal, and no request names a reason.
        return _continue(seen, seen.outcome.reason)
    return _failed(seen)


def _completed(seen: Evidence) -> bool:
    if seen.outcome is None:
        return seen.exit_code == 0 and (seen.results or not _may_have_been_stopped(seen))
    return not seen.outcome.resume and (seen.exit_code == 0 or seen.exit_code > 128)


def _may_have_been_stopped(seen: Evidence) -> bool:
    """Whether the program may have exited with code 0 before it finished, because it got SIGTERM and saved.

    Slurm signals the ranks itself in a preemption with grace time, and when it terminates the job. If the program had
    in fact finished, its next start finds nothing left to do. srun also exits with 0 after it has lost contact with its
    nodes; the ranks may still be running there.
    """
    now = seen.status
    if now.will_requeue or seen.cancel_requested:
        return True
    if seen.stop is not None:
        return seen.stop.then != "finish"
    return now.preempted or (now.known and not now.running)


def _continue(seen: Evidence, reason: Reason) -> Verdict:
    detail = _saved(seen)
    if seen.stop is not None and seen.stop.then in ("pause", "finish"):
        return Verdict(reason=reason, decision="pause", detail=detail)
    if not seen.can_requeue:
        return Verdict(reason=reason, decision="pause", detail=f"{detail}; resilience.requeue is off")
    return Verdict(reason=reason, decision="requeue", detail=detail)


def _saved(seen: Evidence) -> str:
    if seen.outcome is None and seen.exit_code == 0:
        return "the program exited with code 0, but may not have finished"
    if seen.outcome is None:
        saved = "the last checkpoint" if seen.has_checkpoint else "the program's own last save"
        return f"the ranks exited without reporting a result; {saved} remains"
    if seen.outcome.checkpoint is None:
        return f"stopped at step {seen.outcome.step}, nothing saved"
    return f"stopped at step {seen.outcome.step}, saved {seen.outcome.checkpoint}"


def _failed(seen: Evidence) -> Verdict:
    if seen.failure is None:
        return Verdict(reason="failed", decision=_try_again(seen))
    row = seen.failure.cause
    exclude: tuple[str, ...] = ()
    decision: Decision = "end"
    if row.follows == "exclude" and seen.excludable and (seen.spare or seen.can_requeue):
        exclude = seen.excludable
        decision = "restart" if seen.spare and seen.restarts_left > 0 else "requeue" if seen.can_requeue else "end"
    elif (row.follows == "requeue" or (row.never_began and row.follows != "restart")) and seen.can_requeue:
        # A step that Slurm could not start still holds its part of the allocation, so no other step can start.
        decision = "requeue"
    elif row.follows != "end":
        decision = _try_again(seen)
    return Verdict(
        reason="failed",
        decision=decision,
        error_class=row.name,
        detail=seen.failure.detail,
        advice=row.advice,
        nodes_blamed=tuple(seen.failure.nodes),
        rank_blamed=seen.failure.rank,
        exclude=exclude,
    )


def _try_again(seen: Evidence) -> Decision:
    if seen.restarts_left > 0 and seen.enough_nodes:
        return "restart"
    return "requeue" if seen.can_requeue else "end"
