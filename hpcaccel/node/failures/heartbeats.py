"""The ranks' signs of life, as the supervisor sees them: what has changed since it looked before.

Only changes count, by the supervisor's own clock, so that no two clocks are compared. A look that comes late, because
this machine or its file system stood still, lets no more time pass than looks are apart.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from hpcaccel.core.records import Beat, from_dict
from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.errors import RunDirectoryError

__all__ = ["Heartbeats", "Sign"]

LATE_SECONDS = 5.0
"""A look may be so much later than it was to come before it counts as one that was held up."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a rank said last, and how long ago it has changed (seconds)."""

    beat: Beat
    silent: float
    """Since its last beat."""
    idle: float
    """Since it did a step, got a batch, or did something together with the others."""
    still: float
    """Since its main thread was anywhere else."""


@dataclass(frozen=True)
class _Seen:
    beat: Beat
    mtime: int
    beat_at: float
    work_at: float
    stack_at: float


class Heartbeats:
    """All ranks of one attempt."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._folder = run.heartbeats(attempt)
        self._seen: dict[int, _Seen] = {}
        self._now = 0.0
        self._looked: float | None = None

    def look(self, *, expected_seconds: float) -> list[Sign]:
        """What there is, by rank.

        Args:
            expected_seconds: the time between two looks.
        """
        now, files = time.monotonic(), self._files()
        if self._looked is not None and files is not None:
            self._now += min(now - self._looked, expected_seconds + LATE_SECONDS)
        self._looked = now
        for rank, mtime in (files or {}).items():
            beat = self._read(rank)
            if beat is not None:
                self._seen[rank] = self._note(self._seen.get(rank), beat, mtime)
        if files is not None:  # a rank that has taken its sign back can give none, and is none the worse for it
            self._seen = {rank: seen for rank, seen in self._seen.items() if rank in files}
        return [self._sign(seen) for _, seen in sorted(self._seen.items())]

    def _files(self) -> dict[int, int] | None:
        """Times of change (nanoseconds) by rank; None where nothing is known, so that no time passes."""
        try:
            with os.scandir(self._folder) as entries:
                named = [entry for entry in entries if entry.name.endswith(".json") and not entry.name.startswith(".")]
                return {int(entry.name.removesuffix(".json")): entry.stat().st_mtime_ns for entry in named}
        except OSError:
            return None  # no rank has come so far, or the file system is away

    def _read(self, rank: int) -> Beat | None:
        try:
            value = read_json(self._folder / f"{rank}.json")
            return None if value is None else from_dict(Beat, value)
        except (OSError, RunDirectoryError, TypeError):
            return None

    def _note(self, before: _Seen | None, beat: Beat, mtime: int) -> _Seen:
        now = self._now
        if before is None or before.beat.pid != beat.pid:
            return _Seen(beat, mtime, now, now, now)
        if before.mtime != mtime and before.beat.number == beat.number:
            # It lives, and cannot write what it does: a full disk.
            return replace(before, mtime=mtime, beat_at=now, work_at=now, stack_at=now)
        return _Seen(
            beat,
            mtime,
            beat_at=now if before.mtime != mtime else before.beat_at,
            work_at=now if _work(before.beat) != _work(beat) else before.work_at,
            stack_at=now if before.beat.stack != beat.stack else before.stack_at,
        )

    def _sign(self, seen: _Seen) -> Sign:
        now = self._now
        return Sign(beat=seen.beat, silent=now - seen.beat_at, idle=now - seen.work_at, still=now - seen.stack_at)


def _work(beat: Beat) -> tuple[object, ...]:
    return beat.phase, beat.step, beat.batches, beat.calls
