"""What is written down in a run directory, as versioned dataclasses.

Each record knows how to become a plain dict and how to come back from one. Unknown keys are passed over, so that an
older reader opens what a newer writer wrote; missing ones take their defaults.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

__all__ = [
    "AttemptEnd",
    "AttemptStart",
    "Decision",
    "Lease",
    "Outcome",
    "Progress",
    "Reason",
    "RunRecord",
    "StopRequest",
    "from_dict",
    "to_dict",
]

PROTOCOL = 1
"""Version of the contract between node and rank, in ``HPCACCEL_PROTOCOL``."""

EXIT_CONTINUED = 85
"""Exit code of a process that stopped and is to be continued."""

Reason = Literal[
    "completed",  # the program ended by itself, well
    "preempted",  # the cluster wanted the nodes
    "time_limit",
    "stop",  # a user's `hpcaccel stop`
    "cancelled",  # scancel, `hpcaccel cancel`
    "failed",  # the program failed; `error_class` says how
    "lost",  # the attempt ended without a word: node failure, SIGKILL of the batch step
]
"""Why an attempt ended."""

Decision = Literal[
    "end",  # nothing follows
    "requeue",  # the same job comes back through the queue
    "restart",  # the ranks start again inside the same allocation
    "pause",  # nothing follows until `hpcaccel resume`
]
"""What the supervisor does after an attempt."""

R = TypeVar("R")


def to_dict(record: Any) -> dict[str, Any]:
    return asdict(record)


def from_dict(kind: type[R], value: dict[str, Any]) -> R:
    """Build a record from what was read, passing over keys that this version does not know."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: item for key, item in value.items() if key in known})


@dataclass(frozen=True, kw_only=True)
class AttemptStart:
    """A ledger line: the ranks are about to start. Times are seconds since the epoch."""

    event: Literal["start"] = "start"
    version: int = 1
    attempt: int
    time: float
    job_id: str
    restart_count: int = 0
    nodes: list[str] = field(default_factory=list)
    ranks: int = 0
    checkpoint: str | None = None
    """Name of the newest committed checkpoint at this moment, None at the first start."""
    checkpoint_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """A ledger line: the attempt is over and this is what follows."""

    event: Literal["end"] = "end"
    version: int = 1
    attempt: int
    time: float
    reason: Reason
    decision: Decision
    error_class: str | None = None
    detail: str = ""
    """One sentence for people."""
    exit_code: int | None = None
    seconds: float = 0.0
    resumed_step: int = 0
    last_step: int | None = None
    """The last optimizer step that the ranks are known to have done."""
    checkpoint: str | None = None
    checkpoint_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Why the ranks are to stop. In ``control/`` from users, in ``attempts/<n>/stop.json`` from the supervisor."""

    version: int = 1
    reason: Reason
    then: Literal["requeue", "pause", "finish", "cancel"]
    """requeue: save, leave, come back; pause: save, leave; finish: leave the loop and run the code behind it;
    cancel: nothing may come back."""
    time: float
    deadline: float | None = None
    """When the processes will be killed (seconds since the epoch), where that is known."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What rank 0 says before it leaves: trusted over any exit code."""

    version: int = 1
    reason: Reason
    step: int
    checkpoint: str | None = None
    resume: bool = False
    """True: to be continued. False: the training is done."""
    first_loss: float | None = None
    last_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where an attempt's loop starts and where it will end."""

    version: int = 1
    resumed_step: int = 0
    resumed_from: str | None = None
    total_steps: int | None = None
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who writes to a run directory."""

    version: int = 1
    job_id: str
    restart_count: int
    host: str
    pid: int
    pid_start: int
    """Start time of the process in clock ticks since boot (field 22 of /proc/<pid>/stat): a pid alone is used again."""
    time: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Where a run came from. ``job_ids`` holds every Slurm job that the run went through, newest last."""

    version: int = 1
    run_id: str
    name: str
    backend: Literal["slurm", "local"]
    cluster: str = ""
    job_ids: list[str] = field(default_factory=list)
    ledger_offset: int = 0
    """Size of ``attempts.jsonl`` when the newest job was submitted: what stands before it is about earlier jobs."""
    created: float = 0.0
    spec_hash: str = ""
    hpcaccel_version: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    git_dirty: bool | None = None
    submitted_from: str = ""
    array_size: int | None = None
    """Number of tasks, in the parent folder of an array."""
    overrides: dict[str, Any] = field(default_factory=dict)
