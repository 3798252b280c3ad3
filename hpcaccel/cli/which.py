"""Which run is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccel.errors import RunNotFound, UserError

if TYPE_CHECKING:
    from hpcaccel.submission import Run, RunArray

__all__ = ["find", "latest", "one_run"]


def find(name: str) -> Run | RunArray:
    """The run that ``name`` means: an id, the beginning of one, a name, a job id, or a path."""
    from hpcaccel.submission.find import find_run

    return find_run(name)


def latest() -> Run | RunArray:
    """The run that was submitted last."""
    from hpcaccel.submission.find import all_runs

    runs = all_runs()
    if not runs:
        raise RunNotFound("there are no runs yet; start one with hpcaccel submit job.yaml")
    return runs[-1]


def one_run(run: Run | RunArray) -> Run:
    """``run``, unless it is an array, whose tasks are runs of their own."""
    from hpcaccel.submission.run import RunArray

    if isinstance(run, RunArray):
        raise UserError(
            f"{run.run_id} is an array of {len(run)} runs; name one of them, from {run.run_id}_0 to "
            f"{run.run_id}_{len(run) - 1}"
        )
    return run
