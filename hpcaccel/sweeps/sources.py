"""The checkpoint that a trial goes on from, which another trial has left: it is pinned for as long as it is needed.

Between a command that queues a trial once more and that trial's end lie hours, in which others tidy up, and a requeued
worker reads the checkpoint again. A pin that somebody else has set is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files.pins import is_pinned, pin, unpin
from hpcaccel.core.run_dir import SweepDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.trial_attrs import CHECKPOINT, FROM

__all__ = ["hold", "let_go", "source_of"]


def source_of(sweep: SweepDir, marks: Mapping[str, Any]) -> Path | None:
    """Where the trial with these ``marks`` (its user attributes) goes on from; None: at the beginning."""
    if FROM not in marks:
        return None
    noted = marks.get(CHECKPOINT)
    if noted is not None and (sweep.path / str(noted) / checkpoint_files.MANIFEST).exists():
        return sweep.path / str(noted)
    newest = checkpoint_files.newest(sweep.trial(marks[FROM]).checkpoints)
    return None if newest is None else newest.path


def hold(sweep: SweepDir, trial: TrialRecord) -> Path | None:
    """Pin what a trial that goes on from ``trial`` begins with: its newest checkpoint, or what it began with itself.

    Raises:
        RunDirectoryError: the checkpoint's directory cannot be written.
    """
    while (path := _newest(sweep, trial)) is not None:
        try:
            pin(path, why=_why(sweep))
        except FileNotFoundError:
            continue  # it went in this moment
        except OSError as error:
            raise RunDirectoryError(f"cannot pin {path}: {error.strerror or error}") from error
        if (path / checkpoint_files.MANIFEST).exists():
            return path
    return None


def _newest(sweep: SweepDir, trial: TrialRecord) -> Path | None:
    newest = checkpoint_files.newest(sweep.trial(trial.number).checkpoints)
    return source_of(sweep, trial.user_attrs) if newest is None else newest.path


def let_go(sweep: SweepDir, trial: TrialRecord, trials: Iterable[TrialRecord]) -> int | None:
    """Take our pin out of what ``trial``, which has ended, began with; the number of the trial that had left it.

    Returns None where it began anew, or where somebody may still need the checkpoint.

    Raises:
        OSError: the checkpoint's directory cannot be written.
    """
    path = source_of(sweep, trial.user_attrs)
    if path is None or (
        trial.state == "failed" and checkpoint_files.newest(sweep.trial(trial.number).checkpoints) is None
    ):
        return None  # whoever tries it again begins there
    others = (other for other in trials if other.number != trial.number and not other.is_finished)
    if any(source_of(sweep, other.user_attrs) == path for other in others):
        return None
    if is_pinned(path) and _why(sweep) in (path / checkpoint_files.PINNED).read_text(encoding="utf-8"):
        unpin(path)
    return int(path.parent.parent.name)


def _why(sweep: SweepDir) -> str:
    return f"a trial of sweep {sweep.run_id} goes on from it"
