"""Lookup of runs by name, and completion of run names in the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccel.cli.completion import checkpoint_names, known_names
from hpcaccel.errors import RunNotFound, UserError

if TYPE_CHECKING:
    from hpcaccel.submission import Run
    from hpcaccel.submission.runs.run_handle import AnyRun
    from hpcaccel.sweeps.sweep_handle import Sweep

__all__ = ["as_sweep", "complete_checkpoint", "complete_run", "complete_sweep", "find", "latest", "one_run"]


def find(name: str) -> AnyRun:
    """The run that ``name`` refers to: an id, an id prefix, a run name (its latest run), a job id or a path."""
    from hpcaccel.submission.runs.find import find_run

    return find_run(name)


def latest() -> AnyRun:
    """The run that was submitted last."""
    from hpcaccel.submission.runs.find import all_runs

    runs = all_runs()
    if not runs:
        raise RunNotFound("there are no runs yet; start one with hpcaccel submit job.yaml")
    return runs[-1]


def as_sweep(run: AnyRun) -> Sweep | None:
    """The handle of a sweep; None if ``run`` is not a sweep."""
    from hpcaccel.submission.runs.run_handle import SweepRun

    if not isinstance(run, SweepRun):
        return None
    from hpcaccel.sweeps.sweep_handle import Sweep

    return Sweep(run.path)


def one_run(run: AnyRun) -> Run:
    """Return ``run`` unchanged if it is a single run.

    Raises:
        UserError: ``run`` is an array or a sweep, which consists of several runs.
    """
    from hpcaccel.submission.runs.run_handle import RunArray, SweepRun

    if isinstance(run, RunArray):
        raise UserError(
            f"{run.run_id} is an array of {len(run)} runs; choose one of them, {run.run_id}_0 to "
            f"{run.run_id}_{len(run) - 1}"
        )
    if isinstance(run, SweepRun):
        raise UserError(
            f"{run.run_id} is a sweep; choose one of its trials, such as {run.run_id}_0 "
            f"(`hpcaccel sweep table {run.run_id}` lists them)"
        )
    return run


# -- completion, by Typer, in shells that ``completion`` does not support ----------------------------------------


def complete_run(incomplete: str) -> list[tuple[str, str]]:
    """Completions for a run: names, then ids, each newest first and with a description."""
    return [*known_names(incomplete)]


def complete_sweep(incomplete: str) -> list[tuple[str, str]]:
    """Completions for a sweep: names, then ids, each newest first and with a description."""
    return [*known_names(incomplete, only_sweeps=True)]


def complete_checkpoint(incomplete: str) -> list[tuple[str, str]]:
    """Completions for a checkpoint: runs or, after ``RUN@``, the steps of that run's checkpoints."""
    return [*checkpoint_names(incomplete)]
