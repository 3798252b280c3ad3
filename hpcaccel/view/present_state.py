"""The current state in an overview: times, pace, work at risk, ranks, and the bar of the run's life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcaccel.checkpoint_files.watched import SavedCheckpoint
from hpcaccel.core.attempt_steps import StepCount
from hpcaccel.core.durable_files import read_json
from hpcaccel.core.records import RunRecord
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.attempts import Attempt, Metrics, current_step, total_steps
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.hints import hints
from hpcaccel.view.life_bar import life, queued_since
from hpcaccel.view.rank_states import rank_states
from hpcaccel.view.run_pace import TrainingPace, data_wait_share, deadline_of, has_trained, pace_of
from hpcaccel.view.time_report import attempt_spans
from hpcaccel.view.usage import usage
from hpcaccel.view.work_at_risk import at_risk

__all__ = ["present_state"]

HINT_SECONDS = 600.0
"""Advice about waits for data needs an attempt that has trained for this time."""


def present_state(
    run: RunDir, record: RunRecord, status: RunStatus, attempts: list[Attempt], metrics: Metrics,
    checkpoint: SavedCheckpoint | None, counts: Sequence[StepCount], *, now: float,
) -> dict[str, Any]:  # fmt: skip
    """The fields of an overview about times, pace, ranks and the bar of the run's life, by name.

    Args:
        counts: the steps of each attempt.
        now: the current time, in seconds since the epoch.
    """
    active = not status.ended
    spans = attempt_spans(run, attempts, goes_on=active, now=now)
    kept = [one.kept_until for one, attempt in zip(counts, attempts, strict=True) if attempt.start is not None]
    newest = attempts[-1] if attempts else None
    start = None if newest is None else newest.start
    runs = active and newest is not None and newest.end is None and status.state in ("running", "stopping")
    step, total = current_step(attempts, metrics), total_steps(attempts)
    values = {name: value for name, (_, value) in metrics.last.items()}
    pace = pace_of(metrics, spans, values, step=step, total=total) if runs else TrainingPace()
    deadline, used = deadline_of(run, status, attempts), usage(run)
    waited = data_wait_share(spans)
    waits = status.state in ("pending", "requeued")
    estimate = status.estimated_start if waits else None
    return {
        "partition": status.partition or _asked_partition(run),
        "nodes": [] if start is None else start.nodes,
        "queued_since": queued_since(run, spans, record.created, now) if waits else None,
        "started": None if start is None else start.time,
        "ended": newest.end.time if newest is not None and newest.end is not None and status.ended else None,
        "estimated_start": estimate if estimate is not None and estimate > now else None,
        "deadline": deadline, "time_left_seconds": None if deadline is None else max(0.0, deadline - now),
        "steps_per_second": pace.steps_per_second,
        "tokens_per_second": pace.tokens_per_second,
        "eta_seconds": pace.eta_seconds,
        "data_wait_share": waited,
        "at_risk": None if not runs else at_risk(
            run, spans, attempts, checkpoint,
            step=step, seconds_per_step=pace.seconds_per_step, deadline=deadline, now=now,
        ),
        "ranks": rank_states(run, start, newest.end, active=active, now=now, used=used) if newest and start else [],
        "life": [] if status.tasks else life(run, status, spans, kept, created=record.created, now=now),
        "usage": used, "hints": hints(run, used, data_wait_share=waited if has_trained(spans, HINT_SECONDS) else None),
    }  # fmt: skip


def _asked_partition(run: RunDir) -> str:
    """The partition in the run's spec; empty if it names none."""
    section = ((read_json(run.spec) or {}).get("spec") or {}).get("slurm") or {}
    return str(section.get("partition") or "")
