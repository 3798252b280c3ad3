"""Following one run: what is known about it now, taken from its directory a little at a time.

The files of the run directory tell most. The queue is asked seldom: sites want one or two questions a minute from a
tool, and all that it knows better than the files is why a job waits and whether it still exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcaccel.core.records import StopRequest
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.run_state import read_record
from hpcaccel.submission.status import RunStatus, status
from hpcaccel.view.attempts import Attempt, current_step, read_attempts, read_requests, total_steps
from hpcaccel.view.metrics_follower import Metrics

__all__ = ["QUEUE_SECONDS", "Asking", "Snapshot", "Watcher"]

QUEUE_SECONDS = {"slurm": 15.0, "local": 1.0}
"""How long the answer of a status query is used, for each backend. Slurm itself is asked more seldom: that is shared
with all other processes of the user (``slurm.queue``)."""


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


class Asking:
    """A status query that answers from memory while its answer is fresh.

    Args:
        ask: asks the queue and the run directory for the state of the run.
        seconds: how long an answer stays fresh.
        clock: monotonic seconds.
    """

    def __init__(
        self, ask: Callable[[], RunStatus], *, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._seconds = seconds
        self._clock = clock
        self._asked = float("-inf")
        self._answer: RunStatus | None = None

    @classmethod
    def about(cls, run: RunDir) -> Asking:
        """Asks about ``run`` as often as its backend likes."""
        first = [True]

        def ask() -> RunStatus:
            return status(run, patient=not (first and first.pop()))

        return cls(ask, seconds=QUEUE_SECONDS[read_record(run).backend])

    def now(self, *, afresh: bool = False) -> RunStatus:
        """The answer; ``afresh``: something happened, so that the last one does not count."""
        now = self._clock()
        if self._answer is None or afresh or now - self._asked >= self._seconds:
            self._answer, self._asked = self._ask(), now
        return self._answer


class Watcher:
    """Reads what is new in a run directory, and asks for its status from time to time."""

    def __init__(self, run: RunDir, asking: Asking) -> None:
        self.run = run
        self.metrics = Metrics(run)
        self._asking = asking
        self._ledger_lines = 0

    def look(self) -> Snapshot:
        attempts = read_attempts(self.run)
        ledger_lines = sum(1 + (attempt.end is not None) for attempt in attempts)
        status = self._asking.now(afresh=ledger_lines != self._ledger_lines)
        self._ledger_lines = ledger_lines
        self.metrics.read()
        step, total = current_step(attempts, self.metrics), total_steps(attempts)
        return Snapshot(
            status=status,
            attempts=attempts,
            requests=read_requests(self.run),
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
