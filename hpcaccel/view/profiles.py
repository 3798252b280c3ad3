"""The profiler traces of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.profile_requests import profiles_of
from hpcaccel.core.run_dir import RunDir, numbered_folders
from hpcaccel.core.run_ledger import RunLedger

__all__ = ["Profile", "profiles"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A rank's trace of some steps, as ``hpcaccel profile`` has requested it."""

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
