"""What Slurm said last, as it is kept in a file between processes.

A file that cannot be read, is of another version or damaged counts as empty: everything in it can be asked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import atomic_write
from hpcaccel.slurm.states import JobState, QueueEntry

__all__ = ["Finding", "Memory", "Seen", "Shelf"]

VERSION = 1
KEPT_SECONDS = 14 * 86400.0
"""So long is remembered what is known of jobs that have left the queue."""
SETTLED_SECONDS = 900.0
"""A job whose end the accounting knows for so long does not come back by a requeue that it has not heard of yet."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What squeue said last of a job that it does not list any more."""

    state: JobState
    at: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What asking for this very job brought; ``UNKNOWN`` where nothing came of it."""

    state: JobState = JobState.UNKNOWN
    reason: str = ""
    forgotten: bool = False
    """Slurm says that there is no such job, although it remembers its jobs for longer than this one can be over."""
    at: float = 0.0
    end_time: float | None = None

    @property
    def settled(self) -> bool:
        """Whether it need not be asked again."""
        if self.forgotten:
            return True
        return self.state.is_ended and self.end_time is not None and self.at - self.end_time > SETTLED_SECONDS


@dataclass(kw_only=True)
class Memory:
    """Times are seconds since the epoch; 0.0 is never."""

    asked: float = 0.0
    """When the squeue was begun that ``jobs`` comes from."""
    tried: float = 0.0
    """When the newest one was begun, whether it was answered or not."""
    failure: str = ""
    """Why the newest one was not answered; empty where it was."""
    jobs: dict[str, QueueEntry] = field(default_factory=dict)
    """By id (``45``, ``46_3``), those included that have ended and that the controller still remembers."""
    seen: dict[str, Seen] = field(default_factory=dict)
    found: dict[str, Finding] = field(default_factory=dict)
    wanted: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Jobs that somebody has asked about: when that was, and when the job was submitted at the latest."""
    accounting_failed: float = 0.0
    min_job_age: float = 0.0
    min_job_age_asked: float = 0.0
    questions: dict[str, int] = field(default_factory=dict)
    """How often each of Slurm's programs was asked on behalf of all processes, since the file was made."""

    def take(self, jobs: Mapping[str, QueueEntry], *, asked: float) -> None:
        """A new answer of squeue."""
        for job_id, entry in self.jobs.items():
            if job_id not in jobs:
                self.seen[job_id] = Seen(state=entry.state, at=self.asked)
        self.jobs, self.asked, self.tried, self.failure = dict(jobs), asked, asked, ""
        for job_id in jobs:
            self.found.pop(job_id, None)  # it is back
            self.seen.pop(job_id, None)
        self.seen = {one: seen for one, seen in self.seen.items() if asked - seen.at < KEPT_SECONDS}
        self.found = {one: found for one, found in self.found.items() if asked - found.at < KEPT_SECONDS}

    def finding(self, job_id: str, *, submitted: float) -> Finding | None:
        """What was found of the job that was submitted then, and not of one before it that had the same id: those begin
        anew when a cluster is set up anew. None where that is nothing."""
        found = self.found.get(job_id)
        if found is None or found.at <= submitted + (self.min_job_age if found.forgotten else 0.0):
            return None
        return found

    def count(self, program: str) -> None:
        self.questions[program] = self.questions.get(program, 0) + 1


class Shelf:
    """Reads and writes the memory of one cluster.

    Args:
        path: its file; None: nothing is shared, and the memory is this object's own.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last = _unwritten.get(path, Memory()) if path is not None else Memory()
        self._signature: tuple[int, int] | None = None

    def read(self) -> Memory:
        """The newest; what cannot be read counts as empty. The same object as long as the file is the same."""
        if self._path is None:
            return self._last
        try:
            # Opened each time: that is when a network file system looks whether there is a newer one.
            with self._path.open(encoding="utf-8") as file:
                found = os.fstat(file.fileno())
                if found.st_uid == os.geteuid() and (found.st_ino, found.st_mtime_ns) != self._signature:
                    self._last, self._signature = _parsed(file.read()), (found.st_ino, found.st_mtime_ns)
        except OSError:
            pass  # nobody has asked yet, or nobody may read it
        return self._last

    def write(self, memory: Memory) -> None:
        """A file that cannot be written costs the sharing: this process still knows."""
        if self._path is None:
            return
        text = json.dumps({"version": VERSION, **asdict(memory)}, ensure_ascii=False, separators=(",", ":"))
        try:
            atomic_write(self._path, text, mode=0o600, sync=False)
        except OSError:
            _unwritten[self._path] = memory


_unwritten: dict[Path, Memory] = {}


def _parsed(text: str) -> Memory:
    try:
        document = json.loads(text)
        return _memory(document) if document.pop("version") == VERSION else Memory()
    except (ValueError, KeyError, TypeError, AttributeError):
        return Memory()


def _memory(document: dict[str, Any]) -> Memory:
    jobs = {one: QueueEntry(**_with_state(entry)) for one, entry in document.pop("jobs").items()}
    seen = {one: Seen(**_with_state(entry)) for one, entry in document.pop("seen").items()}
    found = {one: Finding(**_with_state(entry)) for one, entry in document.pop("found").items()}
    wanted = {one: (float(when), float(submitted)) for one, (when, submitted) in document.pop("wanted").items()}
    return Memory(jobs=jobs, seen=seen, found=found, wanted=wanted, **document)


def _with_state(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "state": JobState(entry["state"])}
