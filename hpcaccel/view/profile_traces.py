"""Traces of torch's profiler that the ranks of a run have written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.profile_requests import profiles_folder, profiles_of
from hpcaccel.core.run_dir import RunDir, numbered_folders
from hpcaccel.core.run_ledger import RunLedger

__all__ = ["Profile", "profiles", "trace_path"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A rank's trace of some steps, as ``hpcaccel profile`` has requested it."""

    name: str
    """Name of the trace in its run, such as ``1/step_1201-rank0.json.gz``; empty without a trace."""
    attempt: int
    rank: int
    state: str
    """``recording``, ``writing``, ``done`` or ``failed``."""
    first_step: int
    last_step: int
    path: str | None
    """The trace (Chrome's JSON, compressed); None if there is none."""
    bytes: int
    time: float
    detail: str


def profiles(run: RunDir) -> list[Profile]:
    """All traces of a run, oldest first. A recording whose attempt has ended counts as failed.

    Raises:
        RunDirectoryError: a record is not valid JSON.
    """
    ledger = RunLedger.read(run)
    return [
        Profile(
            name="" if one.file is None else f"{attempt}/{Path(one.file).name}",
            attempt=attempt,
            rank=one.rank,
            state=one.state if one.is_over or ledger.end_of(attempt) is None else "failed",
            first_step=one.first_step,
            last_step=one.first_step + one.steps - 1,
            path=None if one.file is None else str(Path(run.path) / one.file),
            bytes=one.bytes,
            time=one.time,
            detail=one.detail if one.is_over or ledger.end_of(attempt) is None else "the attempt ended first",
        )
        for attempt in numbered_folders(run.attempts)
        for one in profiles_of(run, attempt)
    ]


def trace_path(run: RunDir, name: str) -> Path | None:
    """The file of a trace by its name; None if the run has no such trace. Links are not followed."""
    for one in profiles(run):
        if one.path is not None and one.name == name:
            path = Path(one.path)
            there = path.parent == profiles_folder(run, one.attempt)
            return path if there and path.is_file() and not path.is_symlink() else None
    return None
