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
    "Beat",
    "Decision",
    "ExcludedNode",
    "Hang",
    "Lease",
    "Outcome",
    "Progress",
    "Reason",
    "RunRecord",
    "Save",
    "StopRequest",
    "Timing",
    "WorkerEnd",
    "WorkerSeen",
    "WorkerStart",
    "WorkerTaken",
    "from_dict",
    "pruned",
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
    "pruned",  # the sweep has seen enough of this trial, and nothing follows
    "cancelled",  # scancel, `hpcaccel cancel`
    "failed",  # the program failed; `error_class` says how
    "lost",  # the attempt ended without a word: node failure, SIGKILL of the batch step
]
"""Why an attempt ended."""

Decision = Literal[
    "end",  # nothing follows
    "requeue",  # the same job comes back through the queue, or the next one of its chain goes on
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
    queued_at: float | None = None
    """When the job came into the queue, this time, as Slurm says."""
    allocated_at: float | None = None
    """When it got its nodes."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """A ledger line: the attempt is over and this is what follows."""

    event: Literal["end"] = "end"
    version: int = 1
    attempt: int
    time: float
    job_id: str = ""
    """The attempt's job; empty in lines of earlier releases. An end before the ranks started has no start line."""
    reason: Reason
    decision: Decision
    error_class: str | None = None
    detail: str = ""
    """One sentence for people."""
    exit_code: int | None = None
    seconds: float = 0.0
    resumed_step: int | None = None
    """The step that the attempt went on from, 0 at the start of the training; None where its loop never began, and for
    programs that do not tell. Lines of earlier releases say 0 there."""
    last_step: int | None = None
    """The last optimizer step that the ranks are known to have done."""
    first_logged: int | None = None
    """The first step that the program logged a value for in this attempt."""
    checkpoint: str | None = None
    """The newest checkpoint: ours, or the one that an outcome names."""
    checkpoint_step: int | None = None
    advice: str = ""
    """What the user can do about the failure, in a sentence."""
    nodes_blamed: list[str] = field(default_factory=list)
    """Nodes that the evidence speaks against."""
    nodes_excluded: list[str] = field(default_factory=list)
    """Those of them that the run keeps away from, from here on."""
    preflight_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExcludedNode:
    """A node that the run keeps away from, in ``excluded_nodes.json``. Times are seconds since the epoch."""

    node: str
    why: str
    """The class of the failure."""
    detail: str
    time: float
    attempt: int
    expires: float
    tries: int = 0
    """How often a job that started on it all the same went back into the queue."""


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


def pruned(stop: StopRequest | None) -> bool:
    """Whether a sweep gave this up: whatever comes on top of it, nothing follows by itself. With ``then="finish"``
    nothing of it is kept, with ``pause`` it saves, for a budget that may grow."""
    return stop is not None and stop.reason == "pruned"


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
class Save:
    """A checkpoint that was committed: a line of ``saves.jsonl``."""

    version: int = 1
    step: int
    reason: str = ""
    stall_seconds: float
    """How long the training stood still for it, on rank 0; the whole save where it was not in the background."""
    seconds: float
    """From its beginning until it was committed."""
    bytes: int
    """Of all its files."""
    background: bool = False
    time: float = 0.0
    """When rank 0 learned that it was committed."""


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
    kind: Literal["run", "sweep"] = "run"
    backend: Literal["slurm", "local"]
    cluster: str = ""
    job_ids: list[str] = field(default_factory=list)
    ledger_offset: int = 0
    """Size of ``attempts.jsonl`` when the newest job was submitted: what stands before it is about earlier jobs."""
    links: list[str] = field(default_factory=list)
    """Of a chain: all jobs since the newest submit or resume, in their order; those behind the newest of ``job_ids``
    still wait."""
    created: float = 0.0
    spec_hash: str = ""
    hpcaccel_version: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    git_dirty: bool | None = None
    submitted_from: str = ""
    array_size: int | None = None
    """Number of tasks, in the parent folder of an array; of a sweep: of its workers."""
    overrides: dict[str, Any] = field(default_factory=dict)
    branched_from: dict[str, Any] | None = None
    """``checkpoint``, ``step`` and ``run_id`` of where the first attempt starts, if it was named at submission."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What an attempt's time went into, as rank 0 saw it. Times are seconds since the epoch, None before they come."""

    version: int = 1
    process_started: float | None = None
    imported: float | None = None
    """``Accelerator()`` was called."""
    formed: float | None = None
    """All ranks had met."""
    prepared: float | None = None
    """The script was ready to load a checkpoint, or to start without one."""
    loaded: float | None = None
    first_step_time: float | None = None
    """The first step of this attempt was over."""
    resumed_step: int = 0
    last_step: int | None = None
    last_step_time: float | None = None
    step_seconds: float | None = None
    """Median, without saves."""
    slowest_step_seconds: float | None = None
    """After the first one; an evaluation between two steps counts as part of the second."""
    saves: int = 0
    stall_seconds: float = 0.0
    """How long the training stood still for saves, all together."""
    save_seconds: float | None = None
    """Median of a save, until training went on."""
    slowest_save_seconds: float | None = None
    """Of this attempt and those before it."""
    stall_before_first_step: float = 0.0
    stall_after_last_step: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's sign of life, ``attempts/<n>/heartbeats/<rank>.json``, replaced every few seconds by a thread of its
    own. Readers compare it with what they read before, never with their own clock."""

    version: int = 1
    rank: int
    host: str
    pid: int
    number: int
    """Counts the beats of this process."""
    time: float
    interval_seconds: float
    phase: str
    """starting, loading, training, evaluating, saving, finishing (behind the loop) or leaving."""
    step: int
    first_step: int = 0
    """Where this process began: its first step takes longer than the others."""
    batches: int = 0
    """Batches that prepared loaders have given."""
    calls: int = 0
    """What it has done together with the others, by any of our channels."""
    step_seconds: float | None = None
    """Of the last minutes, where a step has been seen in them."""
    waits_in: str | None = None
    """The call in which it has waited for other ranks for a while, where it knows."""
    waits: bool = False
    """Whether the main thread is inside something that waits for other ranks or for a device."""
    site: str = ""
    """``file:line`` of the script where the main thread is."""
    stack: int = 0
    """Changes when the main thread is somewhere else."""
    thread: str = ""
    """The main thread, as a dump of stacks names it."""
    left: str | None = None
    """``file:line`` where it last left a loop before the loop's end, by ``break``, ``return`` or an exception."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Why an attempt was given up, in ``attempts/<n>/hang.json``."""

    version: int = 1
    why: str
    """One sentence for people."""
    culprit_rank: int | None = None
    """The rank that the others wait for; None where none stands out."""
    node: str | None = None
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """A line of a sweep's ``workers/<i>/worker.jsonl``: the worker has got an allocation. Times are seconds since the
    epoch."""

    event: Literal["start"] = "start"
    version: int = 1
    time: float
    job_id: str
    restart_count: int = 0
    nodes: list[str] = field(default_factory=list)
    gpus: int = 0
    """GPUs that the allocation holds, all nodes together."""
    cpus: int = 0
    allocated_at: float | None = None
    """When it got its nodes, as the scheduler says: what is paid for begins here."""
    host: str = ""
    pid: int = 0
    pid_start: int = 0
    """Which process the host is; see ``Lease``."""


@dataclass(frozen=True, kw_only=True)
class WorkerSeen:
    """A line of ``worker.jsonl``: at this moment the allocation was still held. One at least every minute, and one
    whenever a trial starts or ends: what is known of an allocation whose host was killed."""

    event: Literal["seen"] = "seen"
    version: int = 1
    time: float
    trial: int | None = None
    """A trial that has just started, or ended."""
    what: Literal["", "started", "ended"] = ""
    trials: list[int] = field(default_factory=list)
    """Those in flight after that."""


@dataclass(frozen=True, kw_only=True)
class WorkerTaken:
    """A line of ``worker.jsonl``: from this moment on Slurm has been taking the allocation down. What still runs there
    saves and leaves, and the cluster's accounting does not count it (seen with Slurm 22.05)."""

    event: Literal["taken"] = "taken"
    version: int = 1
    time: float


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """A line of ``worker.jsonl``: the host is about to leave the allocation, or to give it back."""

    event: Literal["end"] = "end"
    version: int = 1
    time: float
    reason: Reason
    decision: Decision
    """requeue: the same worker comes back; pause: it waits for `sweep resume`; end: it has nothing more to do."""
    detail: str = ""
    """One sentence for people."""
