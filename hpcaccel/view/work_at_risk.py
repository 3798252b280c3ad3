"""Work at risk: what a running job loses if it is preempted or fails now."""

from __future__ import annotations

from dataclasses import dataclass

from hpcaccel.checkpoint_files import read_manifest
from hpcaccel.checkpoint_files.watched import SavedCheckpoint
from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.formatting import counted, duration
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.attempts import Attempt
from hpcaccel.view.goodput import AttemptSpan

__all__ = ["AtRisk", "at_risk", "commit_time"]


@dataclass(frozen=True, kw_only=True)
class AtRisk:
    """What a running job loses if it is preempted or fails now, without a chance to save."""

    commit_age_seconds: float | None
    """Time since the newest checkpoint was committed; None if there is none, or if its time is unknown."""
    steps_since_commit: int | None
    """Steps that would have to be repeated; None if unknown."""
    cost_seconds: float | None
    """Time to repeat these steps, plus the time that this attempt took from its start to its first step; None if the
    run's pace is unknown."""
    next_deadline: float | None
    """When the job's time limit ends, in seconds since the epoch; None if unknown or unlimited."""
    sentence: str
    """The same, for users."""


def at_risk(
    run: RunDir,
    spans: list[AttemptSpan],
    attempts: list[Attempt],
    checkpoint: SavedCheckpoint | None,
    *,
    step: int | None,
    seconds_per_step: float | None,
    deadline: float | None,
    now: float,
) -> AtRisk:
    """The work at risk of an active run.

    Args:
        spans: the run's attempts that have started.
        checkpoint: the newest complete checkpoint.
        step: the step that the run has reached.
        seconds_per_step: the run's pace, if known.
    """
    committed = None if checkpoint is None else commit_time(run, attempts, checkpoint)
    began = attempts[-1].resumed_step if attempts else None
    saved = began or 0 if checkpoint is None else checkpoint.step
    lost = None if step is None or saved is None else max(0, step - saved)
    timing = spans[-1].timing if spans else None
    pace = seconds_per_step or (None if timing is None else timing.step_seconds)
    cost = None if lost is None or pace is None else lost * pace + _startup_seconds(spans)
    age = None if committed is None else max(0.0, now - committed)
    return AtRisk(
        commit_age_seconds=age,
        steps_since_commit=lost,
        cost_seconds=cost,
        next_deadline=deadline,
        sentence=_sentence(checkpoint, age, lost, cost),
    )


def commit_time(run: RunDir, attempts: list[Attempt], checkpoint: SavedCheckpoint) -> float | None:
    """When a checkpoint was committed, in seconds since the epoch; None if unknown."""
    if checkpoint.time is not None:
        return checkpoint.time
    for attempt in reversed(attempts):
        for line, _ in read_lines(run.saves(attempt.number)):
            if line.get("step") == checkpoint.step and line.get("time"):
                return float(line["time"])
    manifest = None if checkpoint.path is None else read_manifest(checkpoint.path)
    when = None if manifest is None else manifest.get("time")
    return float(when) if isinstance(when, int | float) else None


def _startup_seconds(spans: list[AttemptSpan]) -> float:
    """Time from the start of the newest attempt that reached a step to its first step."""
    for span in reversed(spans):
        if span.timing is not None and span.timing.first_step_time is not None:
            return max(0.0, span.timing.first_step_time - span.start.time)
    return 0.0


def _sentence(
    checkpoint: SavedCheckpoint | None,
    age: float | None,
    lost: int | None,
    cost: float | None,
) -> str:
    if checkpoint is None:
        last = "no checkpoint has been saved yet"
    else:
        at = "" if checkpoint.step is None else f" at step {checkpoint.step}"
        last = f"last checkpoint{at}" if age is None else f"last checkpoint {duration(age)} ago{at}"
    parts = [last]
    if lost is not None:
        spent = "" if cost is None else f", {duration(cost)} with the restart"
        parts.append(f"a failure now would cost {counted(lost, 'step')}{spent}")
    return "; ".join(parts)
