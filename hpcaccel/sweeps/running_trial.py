"""One trial in flight, as its chooser sees it: what it has logged, what was asked of it, what it has cost."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcaccel.core.records import AttemptEnd, Progress, StopRequest, Timing, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir, read_json, read_lines, write_json
from hpcaccel.errors import RunDirectoryError
from hpcaccel.sweeps.trial_metrics import Follower

__all__ = ["Course", "Spent"]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What all attempts of a trial took, as its ledger says."""

    attempts: int
    seconds: float
    """With ranks alive, all attempts together."""
    failures: int
    """Attempts after which the trial was given up, since it was last told to go on with more."""


class Course:
    """Args:
    number: of the trial.
    slot: its place among those that run side by side in this worker.
    metrics: what decides.
    """

    def __init__(self, run: RunDir, number: int, *, slot: int, metrics: Sequence[str]) -> None:
        self.run = run
        self.number = number
        self.slot = slot
        self.follower = Follower(run, metrics)
        self.began = time.time()
        self.asked = ""
        """Why it was asked to end early; empty where nobody has asked."""
        self.over_budget = False
        """Whether that was for the sweep's budget, and not for what it came to."""
        self.reported = 0
        """The last step at which its metric was written to the journal."""

    @property
    def is_new(self) -> bool:
        """Whether it has never run before."""
        return not self.run.ledger.exists()

    @property
    def values(self) -> list[float] | None:
        """The last value of each metric, None where one has not come yet."""
        last = [self.follower.last.get(name) for name in self.follower.names]
        known = [found[1] for found in last if found is not None]
        return known if len(known) == len(last) else None

    def remember(self) -> None:
        """Learn what an earlier chooser has asked of it: one that was killed before it could write down the end."""
        requests = (read_json(path) for path in sorted(self.run.control.glob("*stop-*.json")))
        asked = [request for request in requests if request is not None and request.get("reason") == "pruned"]
        if asked:
            self.over_budget = asked[-1].get("then") == "pause"
            self.asked = "its sweep might cost no more" if self.over_budget else "it was to end early"

    def ask_to_end(self, why: str) -> None:
        """Have its supervisor end it for good, as a trial of which nothing more is wanted.

        Raises:
            RunDirectoryError: its directory cannot be written.
        """
        self.asked = why
        # What the budget ends may go on when there is more of it, from where it leaves.
        then: Literal["pause", "finish"] = "pause" if self.over_budget else "finish"
        request = StopRequest(reason="pruned", then=then, time=time.time())
        name = f"stop-{time.time_ns()}-{secrets.token_hex(2)}.json"
        try:
            write_json(self.run.control / name, to_dict(request))
        except OSError as error:
            raise RunDirectoryError(f"cannot ask trial {self.number} to end: {self.run.control}: {error}") from error

    def spent(self) -> Spent:
        ends = [from_dict(AttemptEnd, line) for line, _ in read_lines(self.run.ledger) if line.get("event") == "end"]
        offset = int((read_json(self.run.record) or {}).get("ledger_offset", 0))
        recent = [line for line, behind in read_lines(self.run.ledger) if behind > offset]
        return Spent(
            attempts=len(ends),
            seconds=sum(end.seconds for end in ends),
            failures=sum(_is_failure(line) for line in recent),
        )

    def steps(self) -> tuple[int | None, int | None]:
        """How many optimizer steps the newest attempt has come to, and how many there will be, where that is known."""
        attempt = self._newest_attempt()
        progress = from_dict(Progress, read_json(self.run.progress(attempt)) or {})
        return self.follower.step, progress.total_steps

    def seconds_to_first_step(self) -> float | None:
        """How long the newest attempt took to get going; None for a program that does not tell."""
        timing = from_dict(Timing, read_json(self.run.timing(self._newest_attempt())) or {})
        return None if timing.first_step_time is None else timing.first_step_time - self.began

    def _newest_attempt(self) -> int:
        starts = [line["attempt"] for line, _ in read_lines(self.run.ledger) if line.get("event") == "start"]
        return max(starts, default=1)


def _is_failure(line: dict[str, object]) -> bool:
    return line.get("event") == "end" and line.get("reason") == "failed" and line.get("decision") == "end"
