"""Jobs that squeue does not list: what the accounting and the controller say of each of them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.queue_cache_file import Finding, Memory
from hpcaccel.slurm.states import AccountingEntry

__all__ = ["MOST_SINGLE", "look_up"]

MOST_SINGLE = 10
"""So many jobs are asked for one by one at a time; the others have their turn when the next answer is due."""
DEFAULT_MIN_JOB_AGE = 300.0
"""Slurm's own, see slurm.conf(5)."""
CONFIGURATION_SECONDS = 86400.0


def look_up(slurm: Slurm, memory: Memory, job_ids: Sequence[str], *, pause_seconds: float) -> None:
    """Put a finding for each of ``job_ids`` into ``memory``: one sacct for all, then scontrol for what is open.

    Args:
        pause_seconds: an accounting that has not answered is left alone for so long.
    """
    told = _ask_accounting(slurm, memory, job_ids, pause_seconds)
    for one, entry in told.items():
        memory.found[one] = Finding(state=entry.state, reason=entry.reason, at=time.time(), end_time=entry.end_time)
    # The accounting may have missed an end; the controller's word on what it believes alive is better.
    is_open = [one for one in job_ids if one not in told or not told[one].state.is_ended]
    by_turn = sorted(is_open, key=lambda one: memory.found[one].at if one in memory.found and one not in told else 0.0)
    for count, one in enumerate(by_turn):
        if count < MOST_SINGLE:
            _ask_controller(slurm, memory, one, told.get(one))
        elif one not in told:
            memory.found[one] = Finding(reason="Slurm is asked about it by and by", at=time.time())


def _ask_accounting(
    slurm: Slurm, memory: Memory, job_ids: Sequence[str], pause_seconds: float
) -> dict[str, AccountingEntry]:
    if abs(time.time() - memory.accounting_failed) < pause_seconds:
        return {}
    memory.count("sacct")
    try:
        entries = slurm.accounting(job_ids)
    except HpcaccelError:
        memory.accounting_failed = time.time()  # there is one, and it does not answer: the controller is asked instead
        return {}
    return {one: entries[one] for one in job_ids if one in entries}


def _ask_controller(slurm: Slurm, memory: Memory, job_id: str, told: AccountingEntry | None) -> None:
    now = time.time()
    memory.count("scontrol")
    try:
        job = slurm.job(job_id)
    except HpcaccelError as error:
        if told is None:
            memory.found[job_id] = Finding(reason=f"Slurm does not answer: {error}", at=now)
        return
    if job is not None:
        memory.found[job_id] = Finding(state=job.state, reason=job.reason, at=now, end_time=job.end_time)
    elif now - _alive_at(memory, job_id) > _min_job_age(slurm, memory):
        memory.found[job_id] = Finding(forgotten=True, at=now)
    else:
        memory.found[job_id] = Finding(reason="Slurm does not know it, although it was there a moment ago", at=now)


def _alive_at(memory: Memory, job_id: str) -> float:
    """When the job was alive for certain."""
    _, submitted = memory.wanted.get(job_id, (0.0, 0.0))
    seen = memory.seen.get(job_id)
    return max(submitted, seen.at) if seen is not None and not seen.state.is_ended else submitted


def _min_job_age(slurm: Slurm, memory: Memory) -> float:
    """For how long Slurm remembers a job that is over, in seconds; 0: for ever."""
    now = time.time()
    if now - memory.min_job_age_asked > CONFIGURATION_SECONDS:
        memory.count("scontrol")
        try:
            words = slurm.config().get("MinJobAge", "")
        except HpcaccelError:
            return memory.min_job_age or DEFAULT_MIN_JOB_AGE
        number = re.match(r"\d+", words)
        memory.min_job_age = float(number[0]) if number else DEFAULT_MIN_JOB_AGE
        memory.min_job_age_asked = now
    return memory.min_job_age
