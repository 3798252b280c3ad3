"""Why a run does not run: Slurm's reason in plain words, when it is expected to start, and what comes before it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.start_estimates import WaitingJob
from hpcaccel.slurm.states import JobInfo, QueueEntry
from hpcaccel.submission.explaining_reasons import meaning
from hpcaccel.submission.run_state import read_facts, read_record
from hpcaccel.submission.stale_jobs import left_in_queue, sentence_on
from hpcaccel.submission.status import RunStatus, status

__all__ = ["Explanation", "Why", "explain_run"]

_WAITING = ("pending", "requeued")
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why one job, or some tasks of an array, wait."""

    job_id: str
    reason: str
    """Slurm's own word."""
    words: str
    advice: str
    waits: bool
    """Whether time alone may mend it."""
    tasks: int = 1


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What there is to say of one run. Times are seconds since 1970."""

    run_id: str
    name: str
    state: str
    detail: str = ""
    """Of a run that does not wait: what it does, or how it ended."""
    advice: str = ""
    why: tuple[Why, ...] = ()
    start_time: float | None = None
    """When the scheduler expects to start it; None where it says nothing."""
    dependency: str = ""
    priority: int | None = None
    before: tuple[WaitingJob, ...] = ()
    """Jobs of its partitions that wait with a higher priority, or with the same and for longer; the first to start
    first, as far as the site shows them."""
    nodes_before: int = 0
    problem: str = ""
    """Why nothing could be found out about the queue."""
    asked: float = field(default_factory=time.time)

    @property
    def shown_before(self) -> Sequence[WaitingJob]:
        return self.before[:_SHOWN]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain_run(run: RunDir, slurm: Slurm | None = None) -> Explanation:
    """Say why ``run`` is where it is; for a run in the queue with two questions to Slurm.

    Raises:
        RunDirectoryError: it is no run directory.
    """
    slurm = slurm or Slurm()
    now = status(run, slurm)
    if not any(one.state in _WAITING for one in now.tasks or [now]):
        return _not_waiting(run, now, left_in_queue(run, slurm) if now.ended else ())
    if read_record(run).backend == "local":
        return Explanation(run_id=now.run_id, name=now.name, state=now.state, detail=now.detail)
    try:
        return _waiting(now, slurm)
    except HpcaccelError as error:
        return Explanation(run_id=now.run_id, name=now.name, state=now.state, detail=now.detail, problem=str(error))


def _not_waiting(run: RunDir, now: RunStatus, waiting: Sequence[QueueEntry] = ()) -> Explanation:
    detail, advice = now.detail, ""
    if not now.tasks:
        facts = read_facts(run)
        end = facts.settled
        if end is not None:
            detail, advice = end.detail or now.detail, end.advice
        elif now.state == "stopping" and facts.asked is not None:
            detail = f"it was asked to stop ({facts.asked.reason})"
    if not advice and now.state in ("failed", "lost", "paused", "cancelled"):
        advice = f"go on, from the newest checkpoint if there is one: hpcaccel resume {now.run_id}"
    if waiting:
        detail = "; ".join(filter(None, [detail, *map(sentence_on, waiting)]))
        advice = "; ".join(filter(None, [f"take it out of the queue: hpcaccel cancel {now.run_id}", advice]))
    return Explanation(run_id=now.run_id, name=now.name, state=now.state, detail=detail, advice=advice)


def _waiting(now: RunStatus, slurm: Slurm) -> Explanation:
    parts = [one for one in now.tasks or [now] if one.state in _WAITING]
    job = slurm.job(parts[0].job_id)
    if job is not None and job.state.is_running:
        return Explanation(run_id=now.run_id, name=now.name, state="starting", detail="it has just got its nodes")
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


def _renewed(parts: Sequence[RunStatus], job: JobInfo | None) -> list[RunStatus]:
    """With the reason that the controller has just given for the first, for all that had the same one.

    What is shared between processes may be a minute old, and a job be held or released since.
    """
    if job is None or not job.reason:
        return list(parts)
    return [replace(one, reason=job.reason) if one.reason == parts[0].reason else one for one in parts]


def _reasons(parts: Sequence[RunStatus]) -> list[Why]:
    """Each reason once, with how many tasks have it."""
    counts: dict[str, list[str]] = {}
    for one in parts:
        counts.setdefault(one.reason or "None", []).append(one.job_id)
    found = []
    for reason, job_ids in counts.items():
        said = meaning(reason)
        job = job_ids[0] if len(job_ids) == 1 else job_ids[0].partition("_")[0]
        found.append(
            Why(
                job_id=job_ids[0],
                reason=reason,
                words=said.words,
                advice=said.advice.replace("JOB", job),
                waits=said.waits,
                tasks=len(job_ids),
            )
        )
    return found


def _expected(job: JobInfo, own: WaitingJob | None) -> float | None:
    """Slurm's estimate, which it makes for the first jobs of the queue only; one in the past is none."""
    start = own.start_time if own is not None and own.start_time is not None else job.start_time
    return start if start is not None and start > time.time() else None


def _is(one: WaitingJob, job_id: str) -> bool:
    """``46_[1-5%2]`` stands for 46_3 as well, and ``46_3`` for itself."""
    return one.job_id == job_id or one.job_id.partition("_[")[0] == job_id.partition("_")[0]


def _before(own: WaitingJob, queue: Sequence[WaitingJob]) -> list[WaitingJob]:
    """What may start and comes first: held jobs and those that wait for others are in nobody's way."""
    place = _place(own)
    ahead = [one for one in queue if _place(one) < place and not one.held and not one.reason.startswith("Dependency")]
    return sorted(ahead, key=_place)


def _place(job: WaitingJob) -> tuple[int, int]:
    """Of jobs of the same priority, which all have where a site weighs nothing (26.11), the older one comes first."""
    return -job.priority, int(re.match(r"\d*", job.job_id)[0] or 0)  # type: ignore[index]
