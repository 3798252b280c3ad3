"""Following one run: snapshots read from its directory, and the events between two of them.

Most facts come from the files of the run directory. The scheduler adds only why a job is pending and whether it still
exists. It is queried rarely, because sites accept one or two queries per minute from a tool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcaccel.core.formatting import clean, duration, number, rate, step_of
from hpcaccel.core.records import AttemptEnd
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest, all_requests, pruned
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.runs.attempts import Attempt, Metrics, current_step, read_attempts, total_steps
from hpcaccel.submission.runs.status import RunStatus, status

__all__ = ["QUEUE_SECONDS", "BackgroundQuery", "Snapshot", "Watcher", "describe_end", "facts", "news", "state_line"]

QUEUE_SECONDS = {"slurm": 15.0, "local": 1.0}
"""How long the result of a status query is reused, by backend. Slurm itself is queried less often: its results are
shared among all processes of the user (``slurm.queue_cache``)."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run at one moment."""

    status: RunStatus
    attempts: list[Attempt]
    requests: list[StopRequest]
    """Requests to stop or cancel the run, made by users or by the run's sweep, oldest first. Includes honoured ones."""
    step: int | None
    total_steps: int | None
    values: dict[str, float]
    """The newest value logged for each name."""
    seconds_left: float | None
    """Estimated time until the last step at the current pace; None if the run is not running, or if its pace or its
    total number of steps is unknown."""

    @property
    def attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0


class BackgroundQuery:
    """A status query whose result is reused for a few seconds.

    Args:
        query: reads the state of the run from the scheduler and the run directory.
        seconds: how long a result is reused.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, query: Callable[[], RunStatus], *, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._query = query
        self._seconds = seconds
        self._clock = clock
        self._queried_at = float("-inf")
        self._status: RunStatus | None = None

    @classmethod
    def about(cls, run: RunDir, slurm: Slurm | None = None) -> BackgroundQuery:
        """A query about ``run`` whose result is reused for the time that ``QUEUE_SECONDS`` has for the run's
        backend."""
        first = [True]

        def query() -> RunStatus:
            return status(run, slurm, patient=not (first and first.pop()))

        return cls(query, seconds=QUEUE_SECONDS[read_record(run).backend])

    def now(self, *, afresh: bool = False) -> RunStatus:
        """The status of the run. If ``afresh`` is true, the cached result is not used."""
        now = self._clock()
        if self._status is None or afresh or now - self._queried_at >= self._seconds:
            self._status, self._queried_at = self._query(), now
        return self._status


class Watcher:
    """Reads new data in a run directory, and queries the run's status at intervals."""

    def __init__(self, run: RunDir, status_query: BackgroundQuery) -> None:
        self.run = run
        self.metrics = Metrics(run)
        self._status_query = status_query
        self._ledger_lines = 0

    def look(self) -> Snapshot:
        attempts = read_attempts(self.run)
        ledger_lines = sum(1 + (attempt.end is not None) for attempt in attempts)
        status = self._status_query.now(afresh=ledger_lines != self._ledger_lines)
        self._ledger_lines = ledger_lines
        self.metrics.read()
        step, total = current_step(attempts, self.metrics), total_steps(attempts)
        return Snapshot(
            status=status,
            attempts=attempts,
            requests=all_requests(self.run),
            step=step,
            total_steps=total,
            values={name: value for name, (_, value) in self.metrics.last.items()},
            seconds_left=self._seconds_left(step, total) if status.state == "running" else None,
        )

    def _seconds_left(self, step: int | None, total: int | None) -> float | None:
        pace = self.metrics.seconds_per_step()
        if pace is None or step is None or total is None:
            return None
        return pace * max(0, total - step)


_SHOWN_FIRST = ("loss", "tokens_per_second")
_SHOWN_VALUES = 5
"""Maximum number of values that are shown beside the progress bar."""

_REASON = {
    "completed": "completed",
    "preempted": "preempted",
    "time_limit": "time limit",
    "stop": "stopped on request",
    "pruned": "pruned",
    "cancelled": "cancelled",
    "failed": "failed",
    "lost": "lost",
}

_COMMANDS = {
    "requeue": "hpcaccel stop --requeue",
    "pause": "hpcaccel stop",
    "finish": "hpcaccel stop --finish",
    "cancel": "hpcaccel cancel",
}

_FOLLOWS = {
    "end": "",
    "requeue": "requeued",
    "restart": "the ranks restart in the same allocation",
    "pause": "paused until `hpcaccel resume`",
}


def news(before: Snapshot | None, after: Snapshot) -> list[str]:
    """Lines about the events between two snapshots, oldest first."""
    events: list[tuple[float, str]] = []
    known = {attempt.number: attempt for attempt in before.attempts} if before is not None else {}
    began = 0.0
    for attempt in after.attempts:
        old = known.get(attempt.number)
        began = max(began, attempt.start.time if attempt.start is not None else 0.0)
        if old is None:
            events.append((began, f"attempt {attempt.number} started{_where(attempt)}"))
        if attempt.resumed_step and (old is None or old.resumed_step is None):
            where = " in memory" if attempt.resumed_from_memory else ""
            events.append((began, f"attempt {attempt.number} resumed from step {attempt.resumed_step}{where}"))
        if attempt.end is not None and (old is None or old.end is None):
            began = max(began, attempt.end.time)
            events.append((began, f"attempt {attempt.number} {describe_end(attempt.end)}"))
    for request in after.requests[len(before.requests) if before is not None else 0 :]:
        command = _COMMANDS.get(request.then, clean(request.then))
        text = "stop requested by its sweep" if pruned(request) else f"stop requested: {command}"
        events.append((request.time, text))
    return [text for _, text in sorted(events, key=lambda event: event[0])]


def describe_end(end: AttemptEnd) -> str:
    """How an attempt ended, such as ``stopped on request: stopped at step 120, saved step_00000120; requeued``."""
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
    """The state of a run and its detail, such as ``pending: Resources``."""
    status = snapshot.status
    return clean(f"{status.state}: {status.detail}" if status.detail else str(status.state))


def facts(snapshot: Snapshot) -> list[str]:
    """Texts for a progress line, in this order: ``step 120/400``, ``loss 2.413``, ``12.3k tokens/s``, ``1m 20s left``.
    Unknown facts are left out, and only the first ``_SHOWN_VALUES`` values are shown."""
    found = [] if snapshot.step is None else [f"step {step_of(snapshot.step, snapshot.total_steps)}"]
    names = [name for name in _SHOWN_FIRST if name in snapshot.values]
    names += [name for name in snapshot.values if name not in names]
    found += [_value(name, snapshot.values[name]) for name in names[:_SHOWN_VALUES]]
    if snapshot.seconds_left is not None:
        found.append(f"{duration(snapshot.seconds_left)} left")
    return found


def _value(name: str, value: float) -> str:
    name = clean(name)
    if name.endswith("_per_second"):
        return f"{rate(value)} {name.removesuffix('_per_second')}/s"
    return f"{name} {number(value)}"
