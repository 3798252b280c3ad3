"""Records of a run directory and of a sweep worker's folder, as versioned dataclasses.

A record is stored as a JSON object. Readers ignore unknown keys, so an older release can read a newer one's files;
missing keys take their defaults. A change that older releases would misread gets a higher ``version``, which they
refuse (``refuse_newer``). Ledgers and heartbeats are read by the copy of the batch step that wrote them, and by
commands, which have read the run's record first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

__all__ = [
    "AttemptEnd",
    "AttemptStart",
    "Decision",
    "ExcludedNode",
    "Hang",
    "Lease",
    "Reason",
    "RunRecord",
    "WorkerEnd",
    "WorkerSeen",
    "WorkerStart",
    "WorkerTaken",
    "from_dict",
    "to_dict",
]

Reason = Literal[
    "completed",  # the program finished
    "preempted",  # the cluster reclaimed the nodes
    "time_limit",
    "stop",  # a user's `hpcaccel stop`
    "pruned",  # the sweep ended this trial early
    "cancelled",  # scancel, `hpcaccel cancel`
    "failed",  # the program failed; `error_class` is the class of the failure
    "lost",  # a node failed, or the batch step was killed before it recorded the end
]
"""Why an attempt ended."""

Decision = Literal[
    "end",  # nothing follows
    "requeue",  # the same job is requeued, or the next job of its chain continues
    "restart",  # the ranks start again inside the same allocation
    "pause",  # nothing follows until `hpcaccel resume`
]
"""What the supervisor does after an attempt."""

R = TypeVar("R")


def to_dict(record: Any) -> dict[str, Any]:
    return asdict(record)


def from_dict(kind: type[R], value: dict[str, Any]) -> R:
    """Build a record from a stored object. Keys that are not fields of this version are ignored."""
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
    """The newest complete checkpoint when the attempt started: the name of one written by hpcaccel, or the path of one
    that the program has written. None if there was none yet."""
    checkpoint_step: int | None = None
    resume_args: list[str] = field(default_factory=list)
    """The arguments that name this checkpoint to the program (``entrypoint.resume_args``)."""
    queued_at: float | None = None
    """When the job was last queued, according to Slurm."""
    allocated_at: float | None = None
    """When the job's nodes were allocated."""
    warm: bool = False
    """Whether the ranks' warm parents had imported their modules, to fork the ranks. False in lines of earlier
    releases."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """A ledger line: how an attempt ended, and what follows."""

    event: Literal["end"] = "end"
    version: int = 1
    attempt: int
    time: float
    job_id: str = ""
    """The attempt's job. Set even if the attempt has no start line because it ended before its ranks started. Empty in
    lines of earlier releases."""
    reason: Reason
    decision: Decision
    error_class: str | None = None
    detail: str = ""
    """One sentence for the user."""
    exit_code: int | None = None
    seconds: float = 0.0
    resumed_step: int | None = None
    """The step that the attempt resumed from (0 at the start of the training); None if unknown. Earlier releases wrote
    0 if it was unknown."""
    resumed_from: str | None = None
    """What the attempt resumed from: the name of a checkpoint, or ``memory`` for a snapshot in the nodes' memory. None
    at the start of the training, if unknown, and in lines of earlier releases."""
    last_step: int | None = None
    """The last step known to be complete."""
    first_logged: int | None = None
    """The first step with a logged value in this attempt."""
    checkpoint: str | None = None
    """The newest complete checkpoint: the name of one written by hpcaccel, or the path of one that the program has
    written (found by ``checkpoint.watch``, or named in the outcome)."""
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    """When a checkpoint of ``checkpoint.watch`` was completed; None for others."""
    advice: str = ""
    """What the user can do about the failure."""
    nodes_blamed: list[str] = field(default_factory=list)
    """Nodes identified as the cause of the failure."""
    rank_blamed: int | None = None
    """The rank that failed first, or that the other ranks wait for in a hang; None if no rank is at fault, if it is
    unknown, and in lines of earlier releases."""
    nodes_excluded: list[str] = field(default_factory=list)
    """Blamed nodes that the run excludes from now on."""
    preflight_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExcludedNode:
    """A node that the run excludes, in ``excluded_nodes.json``. Times are seconds since the epoch."""

    node: str
    why: str
    """The class of the failure."""
    detail: str
    time: float
    attempt: int
    expires: float
    tries: int = 0
    """How often a job was requeued because it started on this node anyway."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The process that owns a run directory: its supervisor or, for a worker's folder, the sweep worker."""

    version: int = 1
    job_id: str
    restart_count: int
    host: str
    pid: int
    pid_start: int
    """Start time of the process in clock ticks since boot (field 22 of /proc/<pid>/stat); a pid alone may be reused."""
    time: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Origin and jobs of a run. ``job_ids`` lists its jobs, newest last, without waiting jobs of its chain."""

    version: int = 1
    run_id: str
    name: str
    kind: Literal["run", "sweep"] = "run"
    backend: Literal["slurm", "local"]
    cluster: str = ""
    job_ids: list[str] = field(default_factory=list)
    ledger_offset: int = 0
    """Size of ``attempts.jsonl`` when the newest job was submitted: lines before it belong to earlier jobs."""
    links: list[str] = field(default_factory=list)
    """Jobs of a chain since the newest submit or resume, in order. Those after the newest of ``job_ids`` are queued."""
    created: float = 0.0
    spec_hash: str = ""
    hpcaccel_version: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    git_dirty: bool | None = None
    submitted_from: str = ""
    array_size: int | None = None
    """For the parent folder of an array, the number of its tasks; for a sweep, the number of its workers."""
    overrides: dict[str, Any] = field(default_factory=dict)
    branched_from: dict[str, Any] | None = None
    """``checkpoint``, ``step`` and ``run_id`` of the checkpoint that the first attempt starts from, if one is set."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The hang that ended an attempt, in ``attempts/<n>/hang.json``."""

    version: int = 1
    why: str
    """One sentence for the user."""
    culprit_rank: int | None = None
    """The rank that all other ranks are waiting for; None if no single rank is to blame."""
    node: str | None = None
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """A line of a sweep's ``workers/<i>/worker.jsonl``: the worker's allocation has started. Times are seconds since
    the epoch."""

    event: Literal["start"] = "start"
    version: int = 1
    time: float
    job_id: str
    restart_count: int = 0
    nodes: list[str] = field(default_factory=list)
    gpus: int = 0
    """GPUs of the allocation, on all nodes together."""
    cpus: int = 0
    allocated_at: float | None = None
    """When the nodes were allocated, according to the scheduler: billing starts here."""
    host: str = ""
    pid: int = 0
    pid_start: int = 0
    """Identity of the worker process; see ``Lease``."""


@dataclass(frozen=True, kw_only=True)
class WorkerSeen:
    """A line of ``worker.jsonl``: the worker holds its allocation at this time.

    Written at least every minute, and whenever a trial starts or ends, so that the end of the allocation is known
    approximately if the worker is killed.
    """

    event: Literal["seen"] = "seen"
    version: int = 1
    time: float
    trial: int | None = None
    """The trial that has just started or ended."""
    what: Literal["", "started", "ended"] = ""
    reason: str = ""
    """Why the trial ended, what follows, and one sentence for the user; empty in lines of earlier releases."""
    decision: str = ""
    detail: str = ""
    trials: list[int] = field(default_factory=list)
    """The trials running after that event."""


@dataclass(frozen=True, kw_only=True)
class WorkerTaken:
    """A line of ``worker.jsonl``: Slurm has begun to terminate the allocation.

    Trials save and exit from then on; Slurm's accounting does not count that time (seen with Slurm 22.05).
    """

    event: Literal["taken"] = "taken"
    version: int = 1
    time: float


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """A line of ``worker.jsonl``: the worker ends its use of the allocation."""

    event: Literal["end"] = "end"
    version: int = 1
    time: float
    reason: Reason
    decision: Decision
    """``requeue`` if the worker continues later, ``pause`` if only after `hpcaccel sweep resume`, ``end`` if never."""
    detail: str = ""
    """One sentence for the user."""
