"""Cache of the queue: the output of one squeue for all jobs of the user, shared by all of the user's processes.

By default, a result is valid for a minute (``HPCACCEL_QUEUE_SECONDS``). After that, one of the processes that need a
result runs squeue, and the others wait for the new result. After hpcaccel has changed the queue, only results of later
queries are valid.

A job that squeue does not list is not necessarily gone: squeue may have failed, or the controller may just have
started. sacct then runs once for all such jobs, and scontrol for those without an end in the accounting. If the
controller has no record of a job, the job is gone only if it was last seen more than ``MinJobAge`` ago: the time for
which Slurm keeps an ended job, see slurm.conf(5). Otherwise the state of the job is unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcaccel.errors import HpcaccelError, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.queue_cache_contents import CachedQueue, CacheFile, look_up
from hpcaccel.slurm.queue_cache_files import QueueCacheFiles, query_turn, shared_files
from hpcaccel.slurm.states import JobState, QueueEntry

__all__ = ["SECONDS_VARIABLE", "CachedJob", "CachedJobs", "Queue"]

SECONDS_VARIABLE = "HPCACCEL_QUEUE_SECONDS"
DEFAULT_SECONDS = 60.0
PAUSE_SECONDS = 2.0
"""Shortest time between two runs of squeue, however often the queue changes; less if results expire sooner."""
QUERY_TIMEOUT_SECONDS = 20.0
"""Time limit of one command."""
PATIENCE_SECONDS = 10.0
"""Longest wait for another process's query if there is an older result to show."""
LONGEST_SECONDS = 90.0
"""Longest wait for another process's query if there is no older result."""


@dataclass(frozen=True, kw_only=True)
class CachedJob:
    """The state of one job, from the cache or a new query."""

    state: JobState = JobState.UNKNOWN
    reason: str = ""
    """Slurm's reason why the job is pending or why it ended."""
    gone: bool = False
    """Whether Slurm has purged the job, so that it is unknown how the job ended."""
    at: float = 0.0
    """Time of the result, in seconds since the epoch."""
    words: str = ""
    """Explanation of an UNKNOWN state, for users."""
    entry: QueueEntry | None = None
    """The job's line of squeue: partition, nodes, and the start and the end as Slurm expects them; None if the state
    comes from another query."""


@dataclass(frozen=True, kw_only=True)
class CachedJobs:
    """The states of all requested jobs, by id."""

    jobs: dict[str, CachedJob]
    asked: float
    """When the squeue that returned this result started, in seconds since the epoch; 0.0 if none has succeeded yet."""
    note: str = ""
    """Why the result is older than requested, for users; empty if the result is new enough."""


class Queue:
    """States of jobs, from the cache or from Slurm.

    Args:
        slurm: runs the queries. If it is not this machine's own Slurm, nothing is shared with other processes.
        seconds: how long a result is valid. Default: ``HPCACCEL_QUEUE_SECONDS``, or a minute; for another machine's
            Slurm, 0.
        files: the shared files. Default: those in the user's state folder.

    Raises:
        UserError: ``HPCACCEL_QUEUE_SECONDS`` is not a number of seconds.
    """

    def __init__(
        self, slurm: Slurm | None = None, *, seconds: float | None = None, files: QueueCacheFiles | None = None
    ) -> None:
        self._slurm = slurm or Slurm(timeout_seconds=QUERY_TIMEOUT_SECONDS)
        self._files = files or (shared_files() if self._slurm.is_here else None)
        self._file = CacheFile(self._files.answer if self._files is not None else None)
        if seconds is None:
            seconds = _chosen_seconds() if self._slurm.is_here else 0.0
        self._seconds = seconds

    def look(
        self, job_ids: Iterable[str], *, after: float | None = None, submitted: Mapping[str, float] | None = None
    ) -> CachedJobs:
        """States of these jobs, from a result that is new enough or from a new query.

        If Slurm does not respond, the last result is returned with a note.

        Args:
            after: seconds since the epoch; only results of queries after this time are used. Default: the time of the
                last change that hpcaccel made to the user's queue, or of the submission of a job without a result,
                whichever is later. With 0.0, any valid result is used (for frequent calls).
            submitted: latest possible submission time of each job. A job does not count as gone before ``MinJobAge``
                has passed since then.
        """
        wanted = dict.fromkeys(job_ids, 0.0) | dict(submitted or {})
        if not wanted:
            return CachedJobs(jobs={}, asked=0.0)
        cache = self._file.read()
        since = self._since(cache, wanted) if after is None else after
        timed_out = False
        if not self._serves(cache, wanted, since):
            cache, timed_out = self._in_turn(wanted, since, cache)
        return _result(cache, wanted, timed_out)

    def questions(self) -> dict[str, int]:
        """Number of calls of each of Slurm's programs so far, by all processes together."""
        return dict(self._file.read().questions)

    # -- is a result new enough? ---------------------------------------------------------------------------------

    def _since(self, cache: CachedQueue, wanted: Mapping[str, float]) -> float:
        changed = self._files.changed() if self._files is not None else 0.0
        unlisted = [one for one in wanted if one not in cache.jobs]
        new = [wanted[one] for one in unlisted if cache.finding(one, submitted=wanted[one]) is None]
        return max([changed, *new])

    def _serves(self, cache: CachedQueue, wanted: Mapping[str, float], since: float) -> bool:
        if not self._is_fresh(cache.tried, since):
            return False
        return bool(cache.failure) or not self._missing(cache, wanted, since)

    def _is_fresh(self, asked: float, since: float) -> bool:
        # The clocks of login nodes with the same home directory differ slightly.
        return asked > since and abs(time.time() - asked) < self._seconds

    def _missing(self, cache: CachedQueue, wanted: Mapping[str, float], since: float) -> list[str]:
        """Jobs that squeue does not list and that need a separate query."""
        missing = []
        for one, submitted in wanted.items():
            if one in cache.jobs or submitted >= cache.asked:
                continue  # submitted after that query: the next query lists it
            found = cache.finding(one, submitted=submitted)
            if found is None or not (found.settled or self._is_fresh(found.at, since)):
                missing.append(one)
        return missing

    # -- queries --------------------------------------------------------------------------------------------------

    def _in_turn(self, wanted: Mapping[str, float], since: float, cache: CachedQueue) -> tuple[CachedQueue, bool]:
        """Query Slurm, or wait for another process's query. Returns the cache, and whether that wait timed out."""
        if self._files is None:
            self._query(cache, wanted, since)
            return cache, False
        patience = PATIENCE_SECONDS if cache.asked else LONGEST_SECONDS

        def has_result() -> bool:
            return self._serves(self._file.read(), wanted, since)

        with query_turn(self._files.lock, has_result=has_result, patience_seconds=patience) as ours:
            cache = self._file.read()
            serves = self._serves(cache, wanted, since)
            if ours and not serves:
                self._pause(cache)
                self._query(cache, wanted, since)
                self._file.write(cache)
        return cache, not ours and not serves

    def _pause(self, cache: CachedQueue) -> None:
        rest = min(PAUSE_SECONDS, self._seconds) - abs(time.time() - cache.tried)
        if rest > 0:
            time.sleep(rest)

    def _query(self, cache: CachedQueue, wanted: Mapping[str, float], since: float) -> None:
        self._add_wanted(cache, wanted)
        if not self._is_fresh(cache.tried, since):
            self._query_squeue(cache)
        if cache.failure:
            return
        requested = {one: submitted for one, (_, submitted) in cache.wanted.items()}
        if missing := self._missing(cache, requested, since):
            look_up(self._slurm, cache, missing, pause_seconds=self._seconds)

    def _add_wanted(self, cache: CachedQueue, wanted: Mapping[str, float]) -> None:
        """Add ``wanted`` to the recently requested jobs, all of which the next query covers."""
        now = time.time()
        recent = {one: request for one, request in cache.wanted.items() if now - request[0] < 2 * self._seconds}
        cache.wanted = recent | {one: (now, submitted) for one, submitted in wanted.items()}

    def _query_squeue(self, cache: CachedQueue) -> None:
        began = time.time()
        cache.count("squeue")
        try:
            cache.take(self._slurm.queue(None, include_ended=True), asked=began)
        except HpcaccelError as error:
            cache.tried, cache.failure = began, str(error)


def _chosen_seconds() -> float:
    text = os.environ.get(SECONDS_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise UserError(
            f"{SECONDS_VARIABLE}={text!r} is not a number of seconds: set 0 to 86400 (default {DEFAULT_SECONDS:g})"
        )
    return seconds


# -- results ----------------------------------------------------------------------------------------------------------


def _result(cache: CachedQueue, wanted: Mapping[str, float], timed_out: bool) -> CachedJobs:
    note = f"Slurm does not respond: {cache.failure}" if cache.failure else ""
    if timed_out:
        note = "a Slurm query is still running"
    jobs = {one: _cached_job(cache, one, submitted, note) for one, submitted in wanted.items()}
    return CachedJobs(jobs=jobs, asked=cache.asked, note=note)


def _cached_job(cache: CachedQueue, job_id: str, submitted: float, note: str) -> CachedJob:
    if (entry := cache.jobs.get(job_id)) is not None and entry.state is not JobState.UNKNOWN:
        return CachedJob(state=entry.state, reason=entry.reason, at=cache.asked, entry=entry)
    found = cache.finding(job_id, submitted=submitted)
    if found is not None and (found.forgotten or found.state is not JobState.UNKNOWN):
        return CachedJob(state=found.state, reason=found.reason, gone=found.forgotten, at=found.at)
    if entry is not None:
        return CachedJob(words="Slurm reports a job state that hpcaccel does not recognise", at=cache.asked)
    seen = cache.seen.get(job_id)
    last = "" if seen is None or seen.at <= submitted else f"; last seen {seen.state.value} at {_clock(seen.at)}"
    why = note or (found.reason if found is not None else "") or "Slurm has not been queried since the submission"
    return CachedJob(words=why + last)


def _clock(when: float) -> str:
    """Clock time, with the date if it is not today. (An age instead would make the message change with every call.)"""
    today = time.strftime("%F") == time.strftime("%F", time.localtime(when))
    return time.strftime("%H:%M:%S" if today else "%F %H:%M", time.localtime(when))
