"""Contents of the queue cache: jobs from squeue, jobs that squeue does not list, and the file that stores both.

A file that is damaged or of another version counts as empty: everything can be queried again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import atomic_write
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import AccountingEntry, JobState, QueueEntry

__all__ = ["MOST_SINGLE", "CacheFile", "CachedQueue", "JobQueryResult", "LastSeen", "look_up"]

VERSION = 1
KEPT_SECONDS = 14 * 86400.0
"""How long results for jobs that have left the queue are kept."""
SETTLED_SECONDS = 900.0
"""Time after a job's end in the accounting from which on this end is final: a requeue would be recorded by then."""
MOST_SINGLE = 10
"""Maximum number of jobs for which scontrol runs in one query; the rest wait for the next query."""
DEFAULT_MIN_JOB_AGE = 300.0
"""Slurm's default for MinJobAge, see slurm.conf(5)."""
CONFIGURATION_SECONDS = 86400.0
"""How long MinJobAge is cached."""


@dataclass(frozen=True, kw_only=True)
class LastSeen:
    """Last state of a job that squeue no longer lists."""

    state: JobState
    at: float


@dataclass(frozen=True, kw_only=True)
class JobQueryResult:
    """Result of a query for a single job; ``UNKNOWN`` if the query returned no state."""

    state: JobState = JobState.UNKNOWN
    reason: str = ""
    forgotten: bool = False
    """Whether Slurm has no such job, and it was last seen more than MinJobAge ago, so that Slurm may have purged it."""
    at: float = 0.0
    end_time: float | None = None

    @property
    def settled(self) -> bool:
        """Whether the result is final."""
        if self.forgotten:
            return True
        return self.state.is_ended and self.end_time is not None and self.at - self.end_time > SETTLED_SECONDS


@dataclass(kw_only=True)
class CachedQueue:
    """Everything in the cache. Times are seconds since the epoch; 0.0 means never."""

    asked: float = 0.0
    """When the squeue that returned ``jobs`` started."""
    tried: float = 0.0
    """When the newest squeue started, successful or not."""
    failure: str = ""
    """Error of the newest squeue; empty if it succeeded."""
    jobs: dict[str, QueueEntry] = field(default_factory=dict)
    """squeue's entries by id (``45``, ``46_3``), including ended jobs that the controller has not purged yet."""
    seen: dict[str, LastSeen] = field(default_factory=dict)
    found: dict[str, JobQueryResult] = field(default_factory=dict)
    wanted: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Recently requested jobs: the time of the request, and the latest possible time of submission, by id."""
    accounting_failed: float = 0.0
    min_job_age: float = 0.0
    min_job_age_asked: float = 0.0
    questions: dict[str, int] = field(default_factory=dict)
    """Number of calls of each of Slurm's programs by all processes, since the file was created."""

    def take(self, jobs: Mapping[str, QueueEntry], *, asked: float) -> None:
        """Store the result of an squeue that started at ``asked``."""
        for job_id, entry in self.jobs.items():
            if job_id not in jobs:
                self.seen[job_id] = LastSeen(state=entry.state, at=self.asked)
        self.jobs, self.asked, self.tried, self.failure = dict(jobs), asked, asked, ""
        for job_id in jobs:
            self.found.pop(job_id, None)  # back in the queue
            self.seen.pop(job_id, None)
        self.seen = {one: seen for one, seen in self.seen.items() if asked - seen.at < KEPT_SECONDS}
        self.found = {one: found for one, found in self.found.items() if asked - found.at < KEPT_SECONDS}

    def finding(self, job_id: str, *, submitted: float) -> JobQueryResult | None:
        """The result of a single-job query for the job submitted at ``submitted``; None if there is none.

        Results of an earlier job with the same id are ignored: ids restart when a cluster is reinstalled.
        """
        found = self.found.get(job_id)
        if found is None or found.at <= submitted + (self.min_job_age if found.forgotten else 0.0):
            return None
        return found

    def count(self, program: str) -> None:
        """Count a call of one of Slurm's programs."""
        self.questions[program] = self.questions.get(program, 0) + 1


class CacheFile:
    """Reads and writes the cache of one cluster.

    Args:
        path: the cache file; None means that the cache is not shared and lives as long as this object.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last = _unwritten.get(path, CachedQueue()) if path is not None else CachedQueue()
        self._signature: tuple[int, int] | None = None

    def read(self) -> CachedQueue:
        """The newest contents; those of the last read if the file cannot be opened; empty contents if it is damaged.
        Returns the same object while the file is unchanged."""
        if self._path is None:
            return self._last
        try:
            # Open the file each time: network file systems check for a newer version on open.
            with self._path.open(encoding="utf-8") as file:
                found = os.fstat(file.fileno())
                if found.st_uid == os.geteuid() and (found.st_ino, found.st_mtime_ns) != self._signature:
                    self._last, self._signature = _parsed(file.read()), (found.st_ino, found.st_mtime_ns)
        except OSError:
            pass  # the file does not exist yet, or is not readable
        return self._last

    def write(self, contents: CachedQueue) -> None:
        """Store ``contents``; only in this process if the file is not writable."""
        if self._path is None:
            return
        text = json.dumps({"version": VERSION, **asdict(contents)}, ensure_ascii=False, separators=(",", ":"))
        try:
            atomic_write(self._path, text, mode=0o600, sync=False)
        except OSError:
            _unwritten[self._path] = contents


_unwritten: dict[Path, CachedQueue] = {}


def _parsed(text: str) -> CachedQueue:
    try:
        document = json.loads(text)
        return _contents(document) if document.pop("version") == VERSION else CachedQueue()
    except (ValueError, KeyError, TypeError, AttributeError):
        return CachedQueue()


def _contents(document: dict[str, Any]) -> CachedQueue:
    jobs = {one: QueueEntry(**_with_state(entry)) for one, entry in document.pop("jobs").items()}
    seen = {one: LastSeen(**_with_state(entry)) for one, entry in document.pop("seen").items()}
    found = {one: JobQueryResult(**_with_state(entry)) for one, entry in document.pop("found").items()}
    wanted = {one: (float(when), float(submitted)) for one, (when, submitted) in document.pop("wanted").items()}
    return CachedQueue(jobs=jobs, seen=seen, found=found, wanted=wanted, **document)


def _with_state(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "state": JobState(entry["state"])}


# -- jobs that squeue does not list ------------------------------------------------------------------------------


def look_up(slurm: Slurm, cache: CachedQueue, job_ids: Sequence[str], *, pause_seconds: float) -> None:
    """Query single jobs: run sacct once for all ``job_ids``, then scontrol for those without an end in the accounting.
    A result for each job is stored in ``cache``.

    Args:
        pause_seconds: time after a failed sacct during which sacct is not run again.
    """
    accounted = _query_accounting(slurm, cache, job_ids, pause_seconds)
    for one, entry in accounted.items():
        cache.found[one] = JobQueryResult(
            state=entry.state, reason=entry.reason, at=time.time(), end_time=entry.end_time
        )
    # The accounting may have missed an end: query the controller for jobs that still run according to the accounting.
    is_open = [one for one in job_ids if one not in accounted or not accounted[one].state.is_ended]
    earlier = {one: found.at for one, found in cache.found.items() if one not in accounted}
    by_turn = sorted(is_open, key=lambda one: earlier.get(one, 0.0))
    for count, one in enumerate(by_turn):
        if count < MOST_SINGLE:
            _query_controller(slurm, cache, one, accounted.get(one))
        elif one not in accounted:
            cache.found[one] = JobQueryResult(reason="not queried yet", at=time.time())


def _query_accounting(
    slurm: Slurm, cache: CachedQueue, job_ids: Sequence[str], pause_seconds: float
) -> dict[str, AccountingEntry]:
    if abs(time.time() - cache.accounting_failed) < pause_seconds:
        return {}
    cache.count("sacct")
    try:
        entries = slurm.accounting(job_ids)
    except HpcaccelError:
        cache.accounting_failed = time.time()  # the accounting exists but does not respond: use scontrol instead
        return {}
    return {one: entries[one] for one in job_ids if one in entries}


def _query_controller(slurm: Slurm, cache: CachedQueue, job_id: str, accounted: AccountingEntry | None) -> None:
    now = time.time()
    cache.count("scontrol")
    try:
        job = slurm.job(job_id)
    except HpcaccelError as error:
        if accounted is None:
            cache.found[job_id] = JobQueryResult(reason=f"Slurm does not respond: {error}", at=now)
        return
    if job is not None:
        cache.found[job_id] = JobQueryResult(state=job.state, reason=job.reason, at=now, end_time=job.end_time)
    elif now - _alive_at(cache, job_id) > _min_job_age(slurm, cache):
        cache.found[job_id] = JobQueryResult(forgotten=True, at=now)
    else:
        cache.found[job_id] = JobQueryResult(reason="Slurm no longer lists the job, although it did recently", at=now)


def _alive_at(cache: CachedQueue, job_id: str) -> float:
    """The last time at which the job certainly existed."""
    _, submitted = cache.wanted.get(job_id, (0.0, 0.0))
    seen = cache.seen.get(job_id)
    return max(submitted, seen.at) if seen is not None and not seen.state.is_ended else submitted


def _min_job_age(slurm: Slurm, cache: CachedQueue) -> float:
    """How long Slurm keeps an ended job, in seconds; 0 means forever."""
    now = time.time()
    if now - cache.min_job_age_asked > CONFIGURATION_SECONDS:
        cache.count("scontrol")
        try:
            text = slurm.config().get("MinJobAge", "")
        except HpcaccelError:
            return cache.min_job_age or DEFAULT_MIN_JOB_AGE
        number = re.match(r"\d+", text)
        cache.min_job_age = float(number[0]) if number else DEFAULT_MIN_JOB_AGE
        cache.min_job_age_asked = now
    return cache.min_job_age
