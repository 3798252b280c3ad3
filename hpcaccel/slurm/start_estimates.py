"""What Slurm says about jobs that have not started: when it would start one, and which wait before it.

Tried on 22.05 and 26.11; the latter prints a stray letter behind the time of ``sbatch --test-only``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcaccel.slurm.states import is_held, parse_duration, parse_state, parse_time

__all__ = ["WAITING_FORMAT", "StartEstimate", "WaitingJob", "parse_estimate", "parse_waiting"]

WAITING_FORMAT = "%i|%Q|%u|%D|%P|%l|%S|%E|%T|%r"


@dataclass(frozen=True, kw_only=True)
class StartEstimate:
    """What ``sbatch --test-only`` answers: it submits nothing. ``refusal`` holds Slurm's words where it would not."""

    start_time: float | None = None
    nodes: str = ""
    """A host list."""
    partition: str = ""
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """A pending job, or all pending tasks of an array, as anybody may see it."""

    job_id: str
    priority: int = 0
    user: str = ""
    node_count: int = 0
    partitions: tuple[str, ...] = ()
    time_limit_seconds: int | None = None
    start_time: float | None = None
    """When the scheduler expects to start it; None where it has not looked so far."""
    dependency: str = ""
    reason: str = ""
    held: bool = False


def parse_estimate(stderr: str) -> StartEstimate | None:
    """``sbatch: Job 49 to start at 2026-11-20T23:06:21 using 3 processors on nodes n[1-3] in partition gpu``."""
    match = re.search(r"Job \d+ to start at (\S+)(?:.*? on nodes (\S+))?(?:.*? in partition (\S+))?", stderr)
    if match is None:
        return None
    return StartEstimate(start_time=parse_time(match[1]), nodes=match[2] or "", partition=match[3] or "")


def parse_waiting(text: str) -> list[WaitingJob]:
    """The lines of ``squeue --noheader --format=WAITING_FORMAT``."""
    found = []
    for line in text.splitlines():
        cells = line.split("|", 9)
        if len(cells) != 10 or not cells[0][:1].isdigit():
            continue  # a warning
        job_id, priority, user, nodes, partitions, limit, start, dependency, state, reason = (
            cell.strip() for cell in cells
        )
        found.append(
            WaitingJob(
                job_id=job_id.removesuffix("+0"),  # of a heterogeneous job the first component has its number
                priority=int(priority) if priority.isdigit() else 0,
                user=user,
                node_count=int(re.match(r"\d*", nodes)[0] or 0),  # type: ignore[index]
                partitions=tuple(partitions.split(",")),
                time_limit_seconds=parse_duration(limit),
                start_time=parse_time(start),
                dependency="" if dependency == "(null)" else dependency,
                reason="" if reason == "None" else reason,
                held=is_held(parse_state(state), reason),
            )
        )
    return found
