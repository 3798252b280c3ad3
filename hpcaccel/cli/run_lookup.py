"""Which run is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccel.errors import RunNotFound, UserError

if TYPE_CHECKING:
    from hpcaccel.submission import Run
    from hpcaccel.submission.run_handle import AnyRun
    from hpcaccel.sweeps.sweep_handle import Sweep

__all__ = ["as_sweep", "find", "latest", "one_run"]


def find(name: str) -> AnyRun:
    """The run that ``name`` means: an id, the beginning of one, a name, a job id, or a path."""
    from hpcaccel.submission.find import find_run

    return find_run(name)


def latest() -> AnyRun:
    """The run that was submitted last."""
    from hpcaccel.submission.find import all_runs

    runs = all_runs()
    if not runs:
        raise RunNotFound("there are no runs yet; start one with hpcaccel submit job.yaml")
    return runs[-1]


def as_sweep(run: AnyRun) -> Sweep | None:
    """``run`` with its trials, where it is a sweep."""
    from hpcaccel.submission.run_handle import SweepRun

    if not isinstance(run, SweepRun):
        return None
    from hpcaccel.sweeps.sweep_handle import Sweep

    return Sweep(run.path)


def one_run(run: AnyRun) -> Run:
    """``run``, unless it is an array or a sweep, whose parts are runs of their own."""
    from hpcaccel.submission.run_handle import RunArray, SweepRun

    if isinstance(run, RunArray):
        raise UserError(
            f"{run.run_id} is an array of {len(run)} runs; name one of them, from {run.run_id}_0 to "
            f"{run.run_id}_{len(run) - 1}"
        )
    if isinstance(run, SweepRun):
        raise UserError(
            f"{run.run_id} is a sweep; name one of its trials, such as {run.run_id}_0. "
            f"They are listed by `hpcaccel sweep table {run.run_id}`"
        )
    return run
