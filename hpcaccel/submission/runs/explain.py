"""Explanation of why a run waits: Slurm's reason in plain words, the expected start, and the jobs before it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.parsing import WaitingJob
from hpcaccel.slurm.states import JobInfo, QueueEntry
from hpcaccel.submission.jobs.run_state import read_facts, read_record
from hpcaccel.submission.runs.pending_reasons import meaning
from hpcaccel.submission.runs.scheduler_state import left_in_queue, sentence_on
from hpcaccel.submission.runs.status import RunStatus, status

__all__ = ["ExplainedFact", "Explanation", "explain_run"]

_WAITING = ("pending", "requeued")
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ExplainedFact:
    """The reason why a job waits, or why several tasks of an array wait."""

    job_id: str
    reason: str
    """Slurm's name for the reason."""
    words: str
    advice: str
    waits: bool
    """Whether the job may start without any action by the user or the site."""
    tasks: int = 1


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation of one run. Times are seconds since 1970."""

    run_id: str
    name: str
    state: str
    detail: str = ""
    """The detail of the run's status, or how the run ended."""
    advice: str = ""
    why: tuple[ExplainedFact, ...] = ()
    start_time: float | None = None
    """Start time estimated by the scheduler; None without an estimate."""
    dependency: str = ""
    priority: int | None = None
    before: tuple[WaitingJob, ...] = ()
    """The waiting jobs in the same partitions that precede this job, sorted by priority, then by job id. Held jobs,
    dependent jobs, and jobs that the site hides are left out."""
    nodes_before: int = 0
    problem: str = ""
    """Why the queue could not be read."""
    asked: float = field(default_factory=time.time)

    @property
    def shown_before(self) -> Sequence[WaitingJob]:
        return self.before[:_SHOWN]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain_run(run: RunDir, slurm: Slurm | None = None) -> Explanation:
    """Explain the state of ``run``. For a run in the queue, Slurm is queried for its job and the jobs before it.

    Raises:
        RunDirectoryError: ``run`` is not a run directory.
    """
    slurm = slurm or Slurm()
    now = status(run, slurm)
    if not any(one.state in _WAITING for one in now.tasks or [now]):
        return _not_waiting(run, now, left_in_queue(run, slurm) if now.ended else ())
    if read_record(run).backend == "local":
        return Explanation(run_id=now.run_id, name=now.name, state=now.state, detail=now.detail)
    try:
        found = _waiting(now, slurm)
    except HpcaccelError as error:
        return Explanation(run_id=now.run_id, name=now.name, state=now.state, detail=now.detail, problem=str(error))
    return replace(found, **_exclusions(run, now.job_id)) if found.why else found


def _not_waiting(run: RunDir, now: RunStatus, waiting: Sequence[QueueEntry] = ()) -> Explanation:
    detail, advice = now.detail, ""
    if not now.tasks:
        facts = read_facts(run)
        end = facts.settled
        if end is not None:
            detail, advice = end.detail or now.detail, end.advice
        elif now.state == "stopping" and facts.asked is not None:
            detail = f"a stop was requested (reason: {facts.asked.reason})"
    if not advice and now.state in ("failed", "lost", "paused", "cancelled"):
        command = "sweep resume" if read_record(run).kind == "sweep" else "resume"
        advice = f"resume it, from the newest checkpoint if there is one: hpcaccel {command} {now.run_id}"
    if waiting:
        detail = "; ".join(filter(None, [detail, *map(sentence_on, waiting)]))
        advice = "; ".join(filter(None, [f"remove it from the queue: hpcaccel cancel {now.run_id}", advice]))
    return Explanation(run_id=now.run_id, name=now.name, state=now.state, detail=detail, advice=advice)


def _waiting(now: RunStatus, slurm: Slurm) -> Explanation:
    parts = [one for one in now.tasks or [now] if one.state in _WAITING]
    job = slurm.job(parts[0].job_id)
    if job is not None and job.state.is_running:
        return Explanation(
            run_id=now.run_id, name=now.name, state="starting", detail="its nodes have just been allocated"
        )
    why = tuple(_reasons(_renewed(parts, job)))
    if job is None:
        return Explanation(run_id=now.run_id, name=now.name, state=now.state, detail=now.detail, why=why)
    queue = slurm.waiting(job.partition.split(",")) if job.partition else []
    own = next((one for one in queue if _is(one, parts[0].job_id)), None)
    before = () if own is None else tuple(_before(own, queue))
    return Explanation(
        run_id=now.run_id,
        name=now.name,
        state=now.state,
        why=why,
        start_time=_expected(job, own),
        dependency="" if own is None else own.dependency,
        priority=None if own is None else own.priority,
        before=before,
        nodes_before=sum(one.node_count for one in before),
    )


def _exclusions(run: RunDir, job_id: str) -> dict[str, Any]:
    """Fields ``detail`` and ``advice`` about the nodes that the run excludes; empty without such nodes."""
    stored = (read_json(run.excluded_nodes) or {}).get("nodes", [])
    nodes = {one["node"] for one in stored if one["expires"] > time.time()}
    if not nodes:
        return {}
    return {
        "detail": f"it excludes {hostlist.compress(nodes)} after failures, see {run.excluded_nodes}",
        "advice": "if too few other nodes are left, delete that file, then set the nodes to exclude, if any: "
        f"scontrol update JobId={job_id} ExcNodeList=",
    }


def _renewed(parts: Sequence[RunStatus], job: JobInfo | None) -> list[RunStatus]:
    """Update the reason of the first part, and of all parts with the same reason, to the controller's current one.

    The shared cache may be a minute old, and a job may have been held or released since.
    """
    if job is None or not job.reason:
        return list(parts)
    return [replace(one, reason=job.reason) if one.reason == parts[0].reason else one for one in parts]


def _reasons(parts: Sequence[RunStatus]) -> list[ExplainedFact]:
    """The distinct reasons, each with the number of tasks that have it."""
    counts: dict[str, list[str]] = {}
    for one in parts:
        counts.setdefault(one.reason or "None", []).append(one.job_id)
    found = []
    for reason, job_ids in counts.items():
        known = meaning(reason)
        job = job_ids[0] if len(job_ids) == 1 else job_ids[0].partition("_")[0]
        found.append(
            ExplainedFact(
                job_id=job_ids[0],
                reason=reason,
                words=known.words,
                advice=known.advice.replace("JOB", job),
                waits=known.waits,
                tasks=len(job_ids),
            )
        )
    return found


def _expected(job: JobInfo, own: WaitingJob | None) -> float | None:
    """Slurm's estimate of the start time, which only the first jobs of the queue have; None if it is in the past."""
    start = own.start_time if own is not None and own.start_time is not None else job.start_time
    return start if start is not None and start > time.time() else None


def _is(one: WaitingJob, job_id: str) -> bool:
    """Whether a line of the queue is for ``job_id``; ``46_[1-5%2]`` matches all tasks of array 46."""
    return one.job_id == job_id or one.job_id.partition("_[")[0] == job_id.partition("_")[0]


def _before(own: WaitingJob, queue: Sequence[WaitingJob]) -> list[WaitingJob]:
    """The jobs that precede ``own`` and can start: held jobs and jobs with dependencies do not delay ``own``."""
    place = _place(own)
    ahead = [one for one in queue if _place(one) < place and not one.held and not one.reason.startswith("Dependency")]
    return sorted(ahead, key=_place)


def _place(job: WaitingJob) -> tuple[int, int]:
    """Sort key: priority, then job id. Without priority weights, all priorities are equal (seen on Slurm 26.11)."""
    return -job.priority, int(re.match(r"\d*", job.job_id)[0] or 0)  # type: ignore[index]
