"""Following one run: what is known about it now, taken from its directory a little at a time.

The files of the run directory tell most. The queue is asked seldom: sites want one or two questions a minute from a
tool, and all that it knows better than the files is why a job waits and whether it still exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcaccel.records import StopRequest
from hpcaccel.rundir import RunDir
from hpcaccel.submission import RunStatus
from hpcaccel.view.history import Attempt, read_attempts, read_requests
from hpcaccel.view.metrics import Metrics

__all__ = ["QUEUE_SECONDS", "Snapshot", "Watcher"]

QUEUE_SECONDS = {"slurm": 15.0, "local": 1.0}
"""How long the answer of a status query is used, for each backend."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is known about a run at one moment."""

    status: RunStatus
    attempts: list[Attempt]
    requests: list[StopRequest]
    """What people asked for (stop, cancel), oldest first, honoured or not."""
    step: int | None
    total_steps: int | None
    values: dict[str, float]
    """The newest value of each name that was logged."""
    seconds_left: float | None
    """Until the last step, at the present pace, while the run is running."""

    @property
    def attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0


class Watcher:
    """Reads what is new in a run directory, and asks ``status`` from time to time.

    Args:
        status: asks the queue and the run directory for the state of the run.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run: RunDir,
        status: Callable[[], RunStatus],
        *,
        queue_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.metrics = Metrics(run.metrics)
        self._status = status
        self._queue_seconds = queue_seconds
        self._clock = clock
        self._asked = float("-inf")
        self._answer: RunStatus | None = None
        self._ledger_size = -1

    def look(self) -> Snapshot:
        self.metrics.read()
        attempts = read_attempts(self.run)
        status = self._current_status(attempts)
        progress = attempts[-1].progress if attempts else None
        total = next((a.progress.total_steps for a in reversed(attempts) if a.progress is not None), None)
        step = self.metrics.step
        if progress is not None and (step is None or self.metrics.recent[-1].attempt != attempts[-1].number):
            step = progress.resumed_step
        return Snapshot(
            status=status,
            attempts=attempts,
            requests=read_requests(self.run),
            step=step,
            total_steps=total,
            values={name: value for name, (_, value) in self.metrics.last.items()},
            seconds_left=self._seconds_left(step, total) if status.state == "running" else None,
        )

    def _current_status(self, attempts: list[Attempt]) -> RunStatus:
        """The last answer, while it is fresh and the ledger says nothing new."""
        size = sum(1 + (attempt.end is not None) for attempt in attempts)
        now = self._clock()
        if self._answer is None or size != self._ledger_size or now - self._asked >= self._queue_seconds:
            self._answer, self._asked, self._ledger_size = self._status(), now, size
        return self._answer

    def _seconds_left(self, step: int | None, total: int | None) -> float | None:
        pace = self.metrics.seconds_per_step()
        if pace is None or step is None or total is None:
            return None
        return pace * max(0, total - step)
