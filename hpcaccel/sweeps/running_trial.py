"""The tuner's view of a running trial: its metrics, its stop request, and its cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.formatting import shortened
from hpcaccel.core.metrics_reader import Line, Logged
from hpcaccel.core.rank_records import Progress, Timing
from hpcaccel.core.records import from_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.core.stop_requests import StopRequest, all_requests, leave_request, pruned
from hpcaccel.sweeps.journal_notes import ATTEMPTS, GPU_SECONDS, STEPS, VALUE_STEP

__all__ = ["RunningTrial", "SpentCompute", "TrialMetrics"]

SHOWN_NAMES = 12


class TrialMetrics:
    """Reads the metrics ``names`` of one trial incrementally, over all attempts, and returns each step once.

    Steps that an attempt repeats after a resume are not returned again; if the value at such a step differs, ``last``
    has the new value.
    """

    def __init__(self, run: RunDir, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.last: dict[str, tuple[int, float]] = {}
        """Step and value logged last, for each of the names."""
        self.seen: set[str] = set()
        """All names for which the trial has logged numbers."""
        self.step: int | None = None
        """The largest logged step."""
        self._logged = Logged(run)
        self._returned: dict[str, int] = {}

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """New steps since the last call, in order, each with the newest attempt's value of each metric."""
        new: dict[int, dict[str, float]] = {}
        for line in self._logged.read():
            self.seen.update(line.values)
            self.step = line.step if self.step is None else max(line.step, self.step)
            for name, value in self._wanted(line).items():
                self.last[name] = (line.step, value)
                if line.step > self._returned.get(name, -1):
                    new.setdefault(line.step, {})[name] = value
        for step, values in new.items():
            for name in values:
                self._returned[name] = max(step, self._returned.get(name, -1))
        return sorted(new.items())

    def _wanted(self, line: Line) -> dict[str, float]:
        return {name: line.values[name] for name in self.names if name in line.values}

    @property
    def never_logged(self) -> str:
        """Message that names the metrics that were not logged, and what was logged instead; empty if all metrics were
        logged."""
        missing = [name for name in self.names if name not in self.last]
        if not missing:
            return ""
        many = "metrics" if len(missing) > 1 else "metric"
        text = f"{many} {', '.join(map(repr, missing))} {'were' if len(missing) > 1 else 'was'} never logged"
        for name in missing:
            if name in self._logged.no_numbers:
                return f"{text} as a number: the trial logged {self._logged.no_numbers[name]} for {name!r}"
        warning = f". In $HPCACCEL_METRICS {self._logged.warning}" if self._logged.warning else ""
        return f"{text}; the trial logged: {self._logged_names()}{warning}"

    def _logged_names(self) -> str:
        names = sorted(self.seen)
        return shortened(names, SHOWN_NAMES) or "nothing"


@dataclass(frozen=True, kw_only=True)
class SpentCompute:
    """Compute time of all attempts of a trial, from its ledger."""

    attempts: int
    seconds: float
    """Time with ranks alive, summed over attempts."""
    failures: int
    """Number of attempts that ended the trial as failed. Attempts before the ``ledger_offset`` of the trial's record do
    not count."""


class RunningTrial:
    """A trial that is running in this worker.

    Args:
        number: the trial's number.
        slot: number of the worker's slot in which the trial runs; a worker has one slot for each concurrent trial.
        metrics: names of the sweep's metrics.
    """

    def __init__(self, run: RunDir, number: int, *, slot: int, metrics: Sequence[str]) -> None:
        self.run = run
        self.number = number
        self.slot = slot
        self.follower = TrialMetrics(run, metrics)
        self.began = time.time()
        self.stop_reason = ""
        """Why a tuner requested that the trial stop early; empty without such a request."""
        self.over_budget = False
        """Whether the stop was requested because of the sweep's budget rather than the trial's metric."""
        self.reported = 0
        """The last step whose metric was written to the journal."""

    @property
    def is_new(self) -> bool:
        """Whether the trial has never run."""
        return not self.run.ledger.exists()

    @property
    def values(self) -> list[float] | None:
        """The last value of each metric; None if one of them has not been logged yet."""
        last = [self.follower.last.get(name) for name in self.follower.names]
        known = [found[1] for found in last if found is not None]
        return known if len(known) == len(last) else None

    def read_stop_request(self) -> None:
        """Restore the stop request of an earlier tuner that was killed before it recorded the trial's end."""
        stops = [request for request in all_requests(self.run) if pruned(request)]
        if stops:
            self.over_budget = stops[-1].then == "pause"
            self.stop_reason = "the sweep's budget was used up" if self.over_budget else "it was pruned"

    def request_stop(self, why: str) -> None:
        """Request that the trial's supervisor stop the trial. ``why`` is recorded with the trial's end.

        Raises:
            RunDirectoryError: the trial's directory cannot be written.
        """
        self.stop_reason = why
        # A trial stopped by the budget saves, so that it can continue under a larger budget.
        then: Literal["pause", "finish"] = "pause" if self.over_budget else "finish"
        leave_request(self.run, StopRequest(reason="pruned", then=then, time=time.time()))

    def spent(self) -> SpentCompute:
        ledger = RunLedger.read(self.run)
        offset = int((read_json(self.run.record) or {}).get("ledger_offset", 0))
        recent = RunLedger.read(self.run, offset=offset).ends
        return SpentCompute(
            attempts=len(ledger.ends),
            seconds=sum(end.seconds for end in ledger.ends),
            failures=sum(end.reason == "failed" and end.decision == "end" for end in recent),
        )

    def end_attributes(self, spent: SpentCompute, *, share: float, complete: bool) -> dict[str, object]:
        """User attributes to record at the trial's end.

        Args:
            share: cost of the trial in GPU-seconds per second.
            complete: whether the trial ran to its end.
        """
        steps, _ = self.steps()
        found: dict[str, object] = {
            GPU_SECONDS: round(spent.seconds * share, 3),
            STEPS: steps,
            ATTEMPTS: spent.attempts,
        }
        last = self.follower.last.get(self.follower.names[0])
        if last is not None and complete:
            found[VALUE_STEP] = last[0]
        return found

    def steps(self) -> tuple[int | None, int | None]:
        """Returns the largest logged step and the total number of optimizer steps; each is None if unknown."""
        attempt = self._newest_attempt()
        progress = from_dict(Progress, read_json(self.run.progress(attempt)) or {})
        return self.follower.step, progress.total_steps

    def seconds_to_first_step(self) -> float | None:
        """Seconds from ``began`` to the first step of the newest attempt; None if the program does not report it."""
        timing = from_dict(Timing, read_json(self.run.timing(self._newest_attempt())) or {})
        return None if timing.first_step_time is None else timing.first_step_time - self.began

    def _newest_attempt(self) -> int:
        return max((line.attempt for line in RunLedger.read(self.run).starts), default=1)
