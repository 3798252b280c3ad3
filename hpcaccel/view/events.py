"""What has happened to a run between two looks, one line an event."""

from __future__ import annotations

from collections.abc import Iterator

from hpcaccel.core.records import AttemptEnd, pruned
from hpcaccel.view.attempts import Attempt
from hpcaccel.view.formatting import clean, duration, number, rate, step_of
from hpcaccel.view.watch import Snapshot

__all__ = ["describe_end", "facts", "news", "state_line"]

_SHOWN_FIRST = ("loss", "tokens_per_second")
_SHOWN_VALUES = 5
"""So many values fit beside the bar."""

_REASON = {
    "completed": "completed",
    "preempted": "preempted",
    "time_limit": "time limit",
    "stop": "asked to stop",
    "pruned": "pruned",
    "cancelled": "cancelled",
    "failed": "failed",
    "lost": "lost without a word",
}

_ASKED = {
    "requeue": "hpcaccel stop --requeue",
    "pause": "hpcaccel stop",
    "finish": "hpcaccel stop --finish",
    "cancel": "hpcaccel cancel",
}

_FOLLOWS = {
    "end": "",
    "requeue": "comes back through the queue",
    "restart": "the ranks start again in the same allocation",
    "pause": "paused until `hpcaccel resume`",
}


def news(before: Snapshot | None, after: Snapshot) -> Iterator[str]:
    """Lines for people about everything that ``before`` did not know yet."""
    for request in after.requests[len(before.requests) if before is not None else 0 :]:
        asked = "somebody asked: " + _ASKED.get(request.then, clean(request.then))
        yield "its sweep has seen enough of this trial" if pruned(request) else asked
    known = {attempt.number: attempt for attempt in before.attempts} if before is not None else {}
    for attempt in after.attempts:
        old = known.get(attempt.number)
        if old is None:
            yield f"attempt {attempt.number} started{_where(attempt)}"
        if attempt.resumed_step and (old is None or old.resumed_step is None):
            yield f"attempt {attempt.number} goes on from step {attempt.resumed_step}"
        if attempt.end is not None and (old is None or old.end is None):
            yield f"attempt {attempt.number} {describe_end(attempt.end)}"


def describe_end(end: AttemptEnd) -> str:
    """``asked to stop: stopped at step 120, saved step_00000120; comes back through the queue``."""
    text = _REASON.get(end.reason, end.reason)
    if end.error_class:
        text += f" ({end.error_class})"
    if end.detail:
        text += f": {end.detail}"
    elif end.last_step is not None:
        text += f" at step {end.last_step}"
    follows = _FOLLOWS.get(end.decision, end.decision)
    return clean(f"{text}; {follows}" if follows else text)


def _where(attempt: Attempt) -> str:
    if attempt.start is None or not attempt.start.nodes or not attempt.start.ranks:
        return ""
    nodes = attempt.start.nodes
    shown = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    ranks = f"{attempt.start.ranks} rank{'s' if attempt.start.ranks != 1 else ''}"
    return clean(f": {ranks} on {shown}")


def state_line(snapshot: Snapshot) -> str:
    """``running``, ``pending: Resources``."""
    status = snapshot.status
    return clean(f"{status.state}: {status.detail}" if status.detail else str(status.state))


def facts(snapshot: Snapshot) -> list[str]:
    """``step 120/400``, ``loss 2.413``, ``12.3k tokens/s``, ``1m 20s left``: what is known, in this order."""
    said = [] if snapshot.step is None else [f"step {step_of(snapshot.step, snapshot.total_steps)}"]
    names = [name for name in _SHOWN_FIRST if name in snapshot.values]
    names += [name for name in snapshot.values if name not in names]
    said += [_value(name, snapshot.values[name]) for name in names[:_SHOWN_VALUES]]
    if snapshot.seconds_left is not None:
        said.append(f"{duration(snapshot.seconds_left)} left")
    return said


def _value(name: str, value: float) -> str:
    name = clean(name)
    if name.endswith("_per_second"):
        return f"{rate(value)} {name.removesuffix('_per_second')}/s"
    return f"{name} {number(value)}"
