"""Job states, and records of jobs, partitions and accounts; times are seconds since the epoch, or None."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

__all__ = [
    "AccountingEntry",
    "Association",
    "JobInfo",
    "JobState",
    "PartitionInfo",
    "QueueEntry",
    "parse_duration",
    "parse_state",
    "parse_time",
]


class JobState(str, Enum):
    """The states that squeue, sacct and scontrol print, and UNKNOWN for any other."""

    PENDING = "PENDING"
    EXPEDITING = "EXPEDITING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"

    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"

    COMPLETING = "COMPLETING"
    STAGE_OUT = "STAGE_OUT"

    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    DEADLINE = "DEADLINE"
    FAILED = "FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REVOKED = "REVOKED"
    TIMEOUT = "TIMEOUT"

    UNKNOWN = "UNKNOWN"

    @property
    def is_pending(self) -> bool:
        """Whether the job is in the queue, including held jobs. sacct reports REQUEUED for a job that was requeued."""
        return self in _PENDING

    @property
    def is_running(self) -> bool:
        """Whether the job has nodes and is not ending. SUSPENDED and STOPPED jobs count: they continue later."""
        return self in _RUNNING

    @property
    def is_ending(self) -> bool:
        """Whether Slurm is ending the job's processes; the job may be requeued afterwards."""
        return self in _ENDING

    @property
    def is_ended(self) -> bool:
        """Whether the job has ended according to this record. A PREEMPTED job may have a newer, PENDING record."""
        return self in _ENDED


_PENDING = frozenset(
    {
        JobState.PENDING,
        JobState.EXPEDITING,
        JobState.REQUEUED,
        JobState.REQUEUE_FED,
        JobState.REQUEUE_HOLD,
        JobState.RESV_DEL_HOLD,
        JobState.SPECIAL_EXIT,
    }
)
_RUNNING = frozenset(
    {
        JobState.CONFIGURING,
        JobState.RUNNING,
        JobState.RESIZING,
        JobState.SIGNALING,
        JobState.STOPPED,
        JobState.SUSPENDED,
    }
)
_ENDING = frozenset({JobState.COMPLETING, JobState.STAGE_OUT})
_ENDED = frozenset(JobState) - _PENDING - _RUNNING - _ENDING - {JobState.UNKNOWN}


def parse_state(text: str) -> JobState:
    """The state in texts such as ``RUNNING``, ``CANCELLED by 0``, ``CANCELLED+`` (truncated), ``FAILED+COMPLETING``.

    If a base state has flags, COMPLETING has priority, then the flags of a requeue, then the base state.
    """
    words = [word for word in re.split(r"[+, ]", text.strip().upper()) if word]
    states = [state for word in words if (state := _state_of(word)) is not JobState.UNKNOWN]
    for wanted in (_ENDING, _PENDING - {JobState.PENDING}):
        for state in states:
            if state in wanted:
                return state
    return states[0] if states else JobState.UNKNOWN


def _state_of(word: str) -> JobState:
    try:
        return JobState(word)
    except ValueError:
        pass
    # sacct truncates a long state to the width of its column: CANCELLED+, OUT_OF_ME+
    matches = [state for state in JobState if len(word) >= 6 and state.value.startswith(word)]
    return matches[0] if len(matches) == 1 else JobState.UNKNOWN


def parse_time(text: str) -> float | None:
    """Slurm's ``2026-11-20T22:58:21`` (local time) as seconds since the epoch; None for Unknown, None and N/A."""
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return None


_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})(?:\.\d+)?")


def parse_duration(text: str) -> int | None:
    """Seconds in a duration as Slurm prints it (``5:00``, ``1-02:00:00``); None for UNLIMITED and any other text."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        parts += [0] * (3 - len(parts))  # 1-12 is a day and twelve hours
    elif len(parts) == 1:
        parts = [*parts, 0]  # a bare number is minutes, as everywhere in Slurm
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + part
    return int(match["days"] or 0) * 86400 + seconds


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job, or one task of an array, from ``scontrol show job``."""

    job_id: str
    """Slurm's job id, e.g. 48 for task ``46_0``."""
    array_job_id: str | None = None
    array_task_id: int | None = None
    name: str = ""
    state: JobState
    reason: str = ""
    preempt_time: float | None = None
    """When Slurm decided to preempt the job; None if it has not."""
    submit_time: float | None = None
    """When the job was last queued; a requeue changes this time."""
    start_time: float | None = None
    """Time of the newest start; for a pending job, of the expected start."""
    end_time: float | None = None
    """When Slurm will kill the job, or when it ended. A preemption or a new time limit changes it."""
    time_limit_seconds: int | None = None
    restarts: int = 0
    nodes: str = ""
    """A host list such as ``n[1-2]``; empty before the start."""
    batch_host: str = ""
    """The node on which the batch step was started; empty before the start."""
    required_nodes: str = ""
    """A host list: the nodes that the job requires by name."""
    excluded_nodes: str = ""
    partition: str = ""
    qos: str = ""
    requeue: bool = False
    """Whether Slurm requeues the job after a node failure or a preemption."""
    exit_code: str = ""
    """``code:signal``"""
    comment: str = ""

    @property
    def address(self) -> str:
        """The id that stands for exactly this job or task on the command lines of Slurm's programs."""
        if self.array_job_id is not None and self.array_task_id is not None:
            return f"{self.array_job_id}_{self.array_task_id}"
        return self.job_id

    @property
    def is_held(self) -> bool:
        return is_held(self.state, self.reason)


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """One line of squeue; each task of an array has its own."""

    job_id: str
    """``45`` or ``46_3``."""
    name: str = ""
    state: JobState
    reason: str = ""
    partition: str = ""
    user: str = ""
    nodes: str = ""
    node_count: int = 0
    start_time: float | None = None
    end_time: float | None = None
    submit_time: float | None = None
    time_limit_seconds: int | None = None

    @property
    def is_held(self) -> bool:
        return is_held(self.state, self.reason)


@dataclass(frozen=True, kw_only=True)
class AccountingEntry:
    """The newest record of a job in the accounting."""

    job_id: str
    name: str = ""
    state: JobState
    cancelled_by: str | None = None
    """The user id in ``CANCELLED by 1000``."""
    exit_code: str = ""
    reason: str = ""
    partition: str = ""
    nodes: str = ""
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    elapsed_seconds: int = 0
    records: int = 1
    """Number of records of the job; each requeue adds one."""


@dataclass(frozen=True, kw_only=True)
class PartitionInfo:
    """One partition from sinfo. If its nodes differ, each number per node is the smallest one."""

    name: str
    default: bool = False
    available: bool = True
    nodes: int = 0
    cpus_per_node: int = 0
    memory_mb_per_node: int = 0
    gpus_per_node: int = 0
    gpu_types: tuple[str, ...] = ()
    time_limit_seconds: int | None = None
    """None if there is no limit."""
    default_time_seconds: int | None = None
    preempt_mode: str = ""
    priority_tier: int = 0


@dataclass(frozen=True, kw_only=True)
class Association:
    """One account that a user may charge, from sacctmgr."""

    account: str
    default: bool = False
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None


def is_held(state: JobState, reason: str) -> bool:
    """Whether a pending job is held: it does not start until a user or an administrator releases it."""
    if state in (JobState.REQUEUE_HOLD, JobState.RESV_DEL_HOLD, JobState.SPECIAL_EXIT):
        return True
    return state is JobState.PENDING and ("held" in reason.lower() or reason == "ReservationDeleted")
