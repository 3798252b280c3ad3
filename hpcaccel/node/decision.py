"""How an attempt ended and what follows: a pure function of what was seen.

``outcome.json`` is trusted over any exit code: with ``--kill-on-bad-exit`` the first rank to leave makes srun kill
the rest, and srun's own code is then 137 or 143. Where there is no outcome it is a failure, or a kill that the
scheduler explains.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcaccel.core.records import Decision, Outcome, Reason, StopRequest, pruned
from hpcaccel.node.allocation import Situation
from hpcaccel.node.failures.classify import Failure

__all__ = ["Seen", "Verdict", "judge"]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that bears on the verdict, gathered when the last rank had ended."""

    exit_code: int
    outcome: Outcome | None
    stop: StopRequest | None
    situation: Situation
    cancel_asked: bool
    """Someone wrote a cancel request, or the job's batch step was told to end with no preemption to explain it."""
    can_requeue: bool
    restarts_left: int
    failure: Failure | None = None
    """Why it failed, if it did."""
    excludable: tuple[str, ...] = ()
    """Those nodes to blame that the run can do without from here on."""
    spare: bool = False
    """Without them, the allocation still has nodes enough."""
    has_checkpoint: bool = True
    """One of ours was committed; a program with checkpoints of its own leaves none."""
    results: bool = False
    """Every rank of a Python function has left the function's result."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    reason: Reason
    decision: Decision
    by_scheduler: bool = False
    """The scheduler brings the job back by itself; asking it to would be refused, or undo a cancel."""
    error_class: str | None = None
    detail: str = ""
    advice: str = ""
    nodes_blamed: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Nodes to keep away from, from here on."""


def judge(seen: Seen) -> Verdict:
    if pruned(seen.stop):
        # Also where it crashed on its way out, or the nodes are wanted back: nobody waits for more of it.
        detail = "" if seen.outcome is None else f"at step {seen.outcome.step}"
        return Verdict(reason="pruned", decision="end", detail=detail)
    if _completed(seen):
        return Verdict(reason="completed", decision="end")
    if seen.cancel_asked:
        return Verdict(reason="cancelled", decision="end", detail=_saved(seen))
    if seen.situation.known and not seen.situation.running:
        # Where the user has paused the run, the job that Slurm starts again ends at once.
        decision: Decision = "pause" if seen.stop is not None and seen.stop.then == "pause" else "requeue"
        if seen.situation.failed_nodes:
            detail = f"node failure: {', '.join(seen.situation.failed_nodes)}; {_saved(seen)}"
            return Verdict(
                reason="lost",
                decision=decision,
                by_scheduler=True,
                error_class="node_failure",
                detail=detail,
                nodes_blamed=seen.situation.failed_nodes,
                exclude=seen.excludable,
            )
        if seen.situation.comes_back:
            reason = seen.situation.taken_for or "preempted"
            return Verdict(reason=reason, decision=decision, by_scheduler=True, detail=_saved(seen))
        if seen.situation.requeueable and seen.situation.taken_for is not None:
            return _continue(seen, seen.situation.taken_for)
        if seen.situation.taken_for is not None:
            detail = f"{_saved(seen)}; Slurm does not bring this job back (with resilience.chain others follow it)"
            return Verdict(reason=seen.situation.taken_for, decision="pause", detail=detail)
        return Verdict(reason="cancelled", decision="end", detail=_saved(seen))
    if seen.situation.preempted:
        return _continue(seen, "preempted")
    if seen.stop is not None:
        return _continue(seen, seen.stop.reason)
    if seen.outcome is not None and seen.outcome.resume:
        # A signal that came to the ranks alone, from nobody who said why.
        return _continue(seen, seen.outcome.reason)
    return _failed(seen)


def _completed(seen: Seen) -> bool:
    if seen.outcome is None:
        return seen.exit_code == 0 and (seen.results or not _told_to_leave(seen))
    return not seen.outcome.resume and (seen.exit_code == 0 or seen.exit_code > 128)


def _told_to_leave(seen: Seen) -> bool:
    """Whether exit code 0 may be that of a program which saved and left because it got SIGTERM.

    Slurm signals the ranks by itself in a preemption with grace time, and when it takes the job down. If the program
    had really finished, its next start finds nothing left to do. srun also ends with 0 when it has lost its nodes,
    where the ranks may even live on.
    """
    now = seen.situation
    if now.comes_back or seen.cancel_asked:
        return True
    if seen.stop is not None:
        return seen.stop.then != "finish"
    return now.preempted or (now.known and not now.running)


def _continue(seen: Seen, reason: Reason) -> Verdict:
    detail = _saved(seen)
    if seen.stop is not None and seen.stop.then in ("pause", "finish"):
        return Verdict(reason=reason, decision="pause", detail=detail)
    if not seen.can_requeue:
        return Verdict(reason=reason, decision="pause", detail=f"{detail}; resilience.requeue is off")
    return Verdict(reason=reason, decision="requeue", detail=detail)


def _saved(seen: Seen) -> str:
    if seen.outcome is None and seen.exit_code == 0:
        return "the program left with exit code 0, which does not say that it has finished"
    if seen.outcome is None:
        counts = "the last checkpoint" if seen.has_checkpoint else "what the program itself saved"
        return f"the ranks left without a word; {counts} counts"
    if seen.outcome.checkpoint is None:
        return f"stopped at step {seen.outcome.step}, nothing saved"
    return f"stopped at step {seen.outcome.step}, saved {seen.outcome.checkpoint}"


def _failed(seen: Seen) -> Verdict:
    if seen.failure is None:
        return Verdict(reason="failed", decision=_try_again(seen))
    row = seen.failure.cause
    exclude: tuple[str, ...] = ()
    decision: Decision = "end"
    if row.follows == "exclude" and seen.excludable and (seen.spare or seen.can_requeue):
        exclude = seen.excludable
        decision = "restart" if seen.spare and seen.restarts_left > 0 else "requeue" if seen.can_requeue else "end"
    elif (row.follows == "requeue" or row.never_began) and seen.can_requeue:
        # A step that Slurm could not begin keeps its part of the allocation, in which no other would ever start.
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
        exclude=exclude,
    )


def _try_again(seen: Seen) -> Decision:
    if seen.restarts_left > 0:
        return "restart"
    return "requeue" if seen.can_requeue else "end"
