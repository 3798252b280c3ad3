"""Reads the ranks' heartbeats for the supervisor, and measures the time since each one changed.

Times are measured with the supervisor's clock alone, so that clocks of different nodes are never compared. If a reading
is delayed because this machine or the file system hung, these times grow by little more than the usual interval.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import from_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError

__all__ = ["Heartbeats", "RankSign"]

LATE_SECONDS = 5.0
"""If a reading is delayed, at most this much of the delay counts as time without a change."""


@dataclass(frozen=True, kw_only=True)
class RankSign:
    """A rank's last heartbeat, and how many seconds ago the heartbeat and its parts changed."""

    beat: Beat
    silent: float
    """Time since the last heartbeat."""
    idle: float
    """Time since the rank did a step, got a batch, made a collective call, or changed its phase."""
    still: float
    """Time since the stack of the rank's main thread changed."""


@dataclass(frozen=True)
class _Seen:
    """A rank's last heartbeat, the file's mtime (nanoseconds), and when the heartbeat and its parts last changed (see
    ``RankSign``)."""

    beat: Beat
    mtime: int
    beat_at: float
    work_at: float
    stack_at: float


class Heartbeats:
    """The heartbeats of all ranks of one attempt."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._folder = run.heartbeats(attempt)
        self._seen: dict[int, _Seen] = {}
        self._now = 0.0
        self._looked: float | None = None

    def look(self, *, expected_seconds: float) -> list[RankSign]:
        """Read all heartbeats. Returns one ``RankSign`` per rank with a heartbeat, in rank order.

        Args:
            expected_seconds: the interval between readings.
        """
        now, files = time.monotonic(), self._files()
        if self._looked is not None and files is not None:
            self._now += min(now - self._looked, expected_seconds + LATE_SECONDS)
        self._looked = now
        for rank, mtime in (files or {}).items():
            beat = self._read(rank)
            if beat is not None:
                self._seen[rank] = self._note(self._seen.get(rank), beat, mtime)
        if files is not None:  # a rank that has removed its heartbeat is no longer watched
            self._seen = {rank: seen for rank, seen in self._seen.items() if rank in files}
        return [self._sign(seen) for _, seen in sorted(self._seen.items())]

    def _files(self) -> dict[int, int] | None:
        """The heartbeat files' modification times (nanoseconds) by rank; None if the folder cannot be read. The time
        since the last reading is then not counted."""
        try:
            with os.scandir(self._folder) as entries:
                named = [entry for entry in entries if entry.name.endswith(".json") and not entry.name.startswith(".")]
                return {int(entry.name.removesuffix(".json")): entry.stat().st_mtime_ns for entry in named}
        except OSError:
            return None  # no rank has started yet, or the file system is unreachable

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
            # The rank is alive but cannot write its state, for instance on a full disk.
            return replace(before, mtime=mtime, beat_at=now, work_at=now, stack_at=now)
        return _Seen(
            beat,
            mtime,
            beat_at=now if before.mtime != mtime else before.beat_at,
            work_at=now if _work(before.beat) != _work(beat) else before.work_at,
            stack_at=now if before.beat.stack != beat.stack else before.stack_at,
        )

    def _sign(self, seen: _Seen) -> RankSign:
        now = self._now
        return RankSign(beat=seen.beat, silent=now - seen.beat_at, idle=now - seen.work_at, still=now - seen.stack_at)


def _work(beat: Beat) -> tuple[object, ...]:
    return beat.phase, beat.step, beat.batches, beat.calls
