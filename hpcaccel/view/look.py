"""Overviews of runs and sweeps by id, name, job id or path, for programs that look often."""

from __future__ import annotations

import os
from pathlib import Path

from hpcaccel.errors import UserError
from hpcaccel.submission.runs.find import find_run
from hpcaccel.submission.runs.run_handle import SweepRun
from hpcaccel.view.run_overview import Overview, overview
from hpcaccel.view.sweep_view import SweepView, sweep_view

__all__ = ["look", "look_sweep"]


def look(run: str | os.PathLike[str], *, runs_dir: Path | None = None, patient: bool = True) -> Overview:
    """The overview of a run, found by its id, name, job id or path.

    Args:
        runs_dir: searched in addition to this user's index.
        patient: whether a state from squeue may be a minute old even if a job has changed since, so that many viewers
            cause one query a minute.

    Raises:
        RunNotFound: no run, or more than one, matches.
        UserError: it is a sweep.
    """
    found = find_run(os.fspath(run), runs_dir=runs_dir)
    if isinstance(found, SweepRun):
        raise UserError(f"{found.dir.run_id} is a sweep: look at it as a sweep, or name one of its trials")
    return overview(found.dir, found.status(patient=patient))


def look_sweep(sweep: str | os.PathLike[str], *, runs_dir: Path | None = None, patient: bool = True) -> SweepView:
    """The view of a sweep, found by its id, name, job id or path. For the arguments, see :func:`look`.

    Raises:
        RunNotFound: no sweep, or more than one, matches.
        UserError: it is not a sweep.
    """
    found = find_run(os.fspath(sweep), runs_dir=runs_dir, only_sweeps=True)
    if not isinstance(found, SweepRun):
        raise UserError(f"{found.dir.run_id} is not a sweep")
    return sweep_view(found.dir, found.status(patient=patient))
