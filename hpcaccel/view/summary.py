"""The last words about a run."""

from __future__ import annotations

from hpcaccel.view.events import describe_end
from hpcaccel.view.formatting import clean, number, step_of
from hpcaccel.view.run_overview import Overview

__all__ = ["summary"]


def summary(run: Overview) -> str:
    """A few lines: how it ended, the attempts, the steps, first and last loss, where it lies."""
    lines = [f"{clean(run.name)} {run.run_id}: {run.state}"]
    if run.state not in ("completed", "running", "pending"):
        lines.append(f"reason: {_reason(run)}")
    if run.advice:
        lines.append(f"advice: {clean(run.advice)}")
    if run.tasks:
        return "\n  ".join([*lines, *map(_task, run.tasks), f"run directory: {clean(run.path)}"])
    lines.append(f"attempts: {run.attempts}")
    if run.step is not None:
        lines.append(f"steps: {step_of(run.step, run.total_steps)}")
        lines.append(f"steps lost: {run.steps_lost}")
    if run.first_loss is not None and run.last_loss is not None:
        lines.append(f"loss: first {number(run.first_loss)}, last {number(run.last_loss)}")
    if run.checkpoint is not None:
        lines.append(f"checkpoint: {run.checkpoint}")
    lines.append(f"run directory: {clean(run.path)}")
    return "\n  ".join(lines)


def _task(task: Overview) -> str:
    changed = ", ".join(f"{key}={value}" for key, value in task.overrides.items())
    loss = "" if task.last_loss is None else f", loss {number(task.last_loss)}"
    return clean(f"{task.run_id} ({changed}): {task.state} at step {step_of(task.step, task.total_steps)}{loss}")


def _reason(run: Overview) -> str:
    last = run.history[-1].end if run.history else None
    if last is not None:
        return f"attempt {run.history[-1].number} {describe_end(last)}"
    return clean(run.detail or run.reason or "not known")
