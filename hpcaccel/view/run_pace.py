"""Pace of a running training: steps and tokens per second, and the estimated time to its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.submission.runs.attempts import Attempt, Metrics
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.goodput import AttemptSpan

__all__ = ["TrainingPace", "data_wait_share", "deadline_of", "has_trained", "pace_of"]

TOKEN_RATES = ("tokens_per_second", "tokens_per_sec", "tokens/s", "tok/s", "tokens_per_s")
"""Names under which programs log their tokens per second; the first one that was logged counts."""


@dataclass(frozen=True, kw_only=True)
class TrainingPace:
    """How fast a run trains; None where unknown."""

    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None

    @property
    def steps_per_second(self) -> float | None:
        return 1 / self.seconds_per_step if self.seconds_per_step else None


def pace_of(
    metrics: Metrics, spans: Sequence[AttemptSpan], values: Mapping[str, float], *, step: int | None, total: int | None
) -> TrainingPace:
    """The pace of a running run's newest attempt: that of the newest logged lines, saves and evaluation included; if
    there are none, the median step time of rank 0."""
    seconds = None
    if spans and metrics.recent and metrics.recent[-1].attempt == spans[-1].start.attempt:
        seconds = metrics.seconds_per_step()
    if seconds is None and spans and spans[-1].timing is not None:
        seconds = spans[-1].timing.step_seconds
    left = None if seconds is None or step is None or total is None else seconds * max(0, total - step)
    rate = next((values[name] for name in TOKEN_RATES if math.isfinite(values.get(name, math.nan))), None)
    return TrainingPace(seconds_per_step=seconds, tokens_per_second=rate, eta_seconds=left)


def data_wait_share(spans: Sequence[AttemptSpan]) -> float | None:
    """Share of the newest attempt's time since its first step for which rank 0 has waited for batches; None before its
    second step, and if it uses no prepared loader."""
    timing = spans[-1].timing if spans else None
    if timing is None or timing.data_wait_seconds is None:
        return None
    if timing.first_step_time is None or timing.last_step_time is None:
        return None
    seconds = timing.last_step_time - timing.first_step_time
    return None if seconds <= 0 else min(1.0, max(0.0, timing.data_wait_seconds / seconds))


def has_trained(spans: Sequence[AttemptSpan], seconds: float) -> bool:
    """Whether the newest attempt has trained for at least ``seconds`` since its first step."""
    timing = spans[-1].timing if spans else None
    if timing is None or timing.first_step_time is None or timing.last_step_time is None:
        return False
    return timing.last_step_time - timing.first_step_time >= seconds


def deadline_of(run: RunDir, status: RunStatus, attempts: Sequence[Attempt]) -> float | None:
    """When the time limit of the run's present job ends, in seconds since the epoch; None if unknown or unlimited.

    On the local backend, it is computed from the job's start in the ledger.
    """
    if status.ended or status.deadline is not None:
        return status.deadline
    start = attempts[-1].start if attempts else None
    if start is None or start.allocated_at is None or not start.job_id.startswith("local-"):
        return None
    try:
        launch = find_launch(run)
    except RunDirectoryError:  # a damaged spec.json: other readers of the file report it
        return None
    limit = None if launch is None else launch.time_limit_seconds
    return None if limit is None else start.allocated_at + limit
