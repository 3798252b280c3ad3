"""In-memory fake of :class:`~hpcaccel.slurm.commands.Slurm` for unit tests, which set the states of its jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcaccel.errors import ClusterError, SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.error_messages import is_unreachable
from hpcaccel.slurm.hostlist import array_indices
from hpcaccel.slurm.parsing import StartEstimate, WaitingJob
from hpcaccel.slurm.queries import is_script
from hpcaccel.slurm.states import AccountingEntry, Association, JobInfo, JobState, PartitionInfo, QueueEntry

__all__ = ["FakeSlurm", "Submission"]

SUBMIT_LIMIT = (
    "QOSMaxSubmitJobPerUserLimit; Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)
"""Error of Slurm 22.05 for a job or array that exceeds a QOS's limit of jobs per user."""


@dataclass(frozen=True)
class Submission:
    """One call of sbatch."""

    job_id: str
    script: Path
    text: str
    args: tuple[str, ...]
    env: dict[str, str]
    words: tuple[str, ...] = ()


@dataclass
class FakeSlurm:
    """Jobs start PENDING; :meth:`move` changes their state. Calls are recorded in ``submissions``, ``cancelled`` etc.

    If set, ``refuse`` is the error of sbatch, and ``unreachable`` the error of every command. Without ``may_requeue``
    the site removes --requeue from each job.
    """

    installed: bool = True
    refuse: str = ""
    unreachable: str = ""
    accounted: bool = True
    may_requeue: bool = True
    known_partitions: list[PartitionInfo] = field(default_factory=lambda: [PartitionInfo(name="gpu", default=True)])
    known_associations: list[Association] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    most_tasks: int | None = None
    """sbatch fails if there would be more unended jobs and tasks than this, as with a QOS."""

    jobs: dict[str, JobInfo] = field(default_factory=dict)
    """By address: ``45``, ``46_3``."""
    steps: dict[str, JobState] = field(default_factory=dict)
    """Final state of steps, by ID (``45.0``)."""
    submissions: list[Submission] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    requeued: list[str] = field(default_factory=list)
    signals: list[tuple[str, str, str]] = field(default_factory=list)
    throttled: dict[str, int] = field(default_factory=dict)
    dependencies: dict[str, str] = field(default_factory=dict)
    """Dependencies of pending jobs, by job ID."""
    partition_rows: list[dict[str, str]] = field(default_factory=list)
    node_rows: list[dict[str, str]] = field(default_factory=list)
    association_rows: list[dict[str, str]] = field(default_factory=list)
    qos_rows: list[dict[str, str]] = field(default_factory=list)
    """Rows of Slurm's tables of its site, with Slurm's keys."""
    pyxis: bool = False
    estimate: StartEstimate = field(default_factory=StartEstimate)
    """Result of sbatch --test-only."""
    tested: list[str] = field(default_factory=list)
    """Scripts passed to sbatch --test-only."""
    others: list[WaitingJob] = field(default_factory=list)
    """Pending jobs of all users."""
    calls: list[str] = field(default_factory=list)

    def move(self, job_id: str, state: JobState, **changes: object) -> JobInfo:
        """Set a job's state, and other fields of JobInfo by name."""
        self.jobs[job_id] = replace(self.jobs[job_id], state=state, **changes)  # type: ignore[arg-type]
        return self.jobs[job_id]

    def forget(self, job_id: str) -> None:
        """Remove a job, as Slurm does some minutes after its end."""
        del self.jobs[job_id]

    @property
    def is_here(self) -> bool:
        return False

    def holding(self, descriptor: int) -> Slurm:
        return self  # type: ignore[return-value]

    def available(self) -> bool:
        return self.installed

    def version(self) -> str:
        self._called("version")
        return "22.05.8"

    def sbatch(
        self, script: Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None, *, words: Sequence[str] = ()
    ) -> str:
        self._called("sbatch")
        if self.refuse:
            raise ClusterError(f"Slurm refused the job: {self.refuse}")
        text = script.read_text(encoding="utf-8")
        job_id = str(100 + len(self.submissions))
        environment = dict(os.environ if env is None else env)
        indices = _array_option(text, args)
        if self.most_tasks is not None and self._unended() + len(indices or [0]) > self.most_tasks:
            raise ClusterError(f"Slurm refused the job: {SUBMIT_LIMIT}")
        self.submissions.append(Submission(job_id, script, text, tuple(args), environment, tuple(words)))
        requeue = self.may_requeue and "#SBATCH --requeue" in text
        if indices is None:
            self.jobs[job_id] = JobInfo(job_id=job_id, state=JobState.PENDING, partition="gpu", requeue=requeue)
        for index in indices or []:
            job = JobInfo(
                job_id=job_id, array_job_id=job_id, array_task_id=index, state=JobState.PENDING, requeue=requeue
            )
            self.jobs[job.address] = job
        return job_id

    def test_only(self, script: Path, args: Sequence[str] = ()) -> StartEstimate:
        self._called("test_only")
        self.tested.append(script.read_text(encoding="utf-8"))
        return StartEstimate(refusal=f"Slurm refused the job: {self.refuse}") if self.refuse else self.estimate

    def waiting(self, partitions: Sequence[str]) -> list[WaitingJob]:
        self._called("waiting")
        return [one for one in self.others if set(one.partitions) & set(partitions)]

    def job(self, job_id: str) -> JobInfo | None:
        self._called("job")
        return self.jobs.get(job_id) or next(iter(self._matching([job_id]).values()), None)

    def queue(self, job_ids: Sequence[str] | None = None, *, include_ended: bool = False) -> dict[str, QueueEntry]:
        self._called("queue")
        return {
            address: QueueEntry(
                job_id=address,
                name=job.name,
                state=job.state,
                reason=job.reason,
                partition=job.partition,
                nodes=job.nodes,
                start_time=job.start_time,
                end_time=job.end_time,
                time_limit_seconds=job.time_limit_seconds,
            )
            for address, job in self._matching(job_ids).items()
            if include_ended or not job.state.is_ended
        }

    def jobs_of_script(self, script: Path) -> list[str]:
        self._called("jobs_of_script")
        mine = (one for one in self.submissions if is_script(str(one.script), script))
        return [one.job_id for one in mine if self._matching([one.job_id])]

    def workers_of_script(self, script: Path) -> dict[int, str]:
        self._called("workers_of_script")
        mine = (one for one in self.submissions if is_script(str(one.script), script))
        return {
            int(one.words[0] if one.words else 0) + int(address.partition("_")[2]): address
            for one in mine
            for address in self._matching([one.job_id])
        }

    def accounting(self, job_ids: Sequence[str]) -> dict[str, AccountingEntry]:
        self._called("accounting")
        if not self.accounted:
            return {}
        return {
            address: AccountingEntry(job_id=address, name=job.name, state=job.state, exit_code=job.exit_code)
            for address, job in self._matching(job_ids).items()
        }

    def step_state(self, job_id: str, step_id: str | int) -> JobState | None:
        self._called("step_state")
        return self.steps.get(f"{job_id}.{step_id}") if self.accounted else None

    def step_named(self, job_id: str, name: str) -> str | None:
        self._called("step_named")
        return None  # no steps of a name are started here

    def job_record(self, job_id: str) -> dict[str, str]:
        self._called("job_record")
        return {}

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        self._called("cancel")
        live = {
            one: job
            for one, job in self._matching([job_id]).items()
            if not job.state.is_ended and (not only_pending or _is_plainly_pending(job.state))
        }
        for address in live:
            self.move(address, JobState.CANCELLED, end_time=time.time())
        self.cancelled.append(job_id)

    def signal_step(self, job_id: str, step_id: str | int, signal: str) -> bool:
        self._called("signal_step")
        self.signals.append((job_id, str(step_id), signal))
        return any(job.state.is_running for job in self._matching([job_id]).values())

    def requeue(self, job_id: str) -> bool:
        self._called("requeue")
        job = self.jobs.get(job_id)
        if job is None:
            raise SlurmCommandError(["scontrol", "requeue", job_id], 1, "Invalid job id specified")
        if job.state.is_pending:
            return False
        self.requeued.append(job_id)
        self.move(job_id, JobState.PENDING, restarts=job.restarts + 1, reason="BeginTime")
        return True

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        self._called("exclude")
        if not self.jobs[job_id].state.is_pending:
            raise SlurmCommandError(["scontrol", "update", job_id], 1, "Job is no longer pending execution")
        self.jobs[job_id] = replace(self.jobs[job_id], excluded_nodes=",".join(nodes))

    def depend(self, job_id: str, dependency: str) -> None:
        self._called("depend")
        if any(job.state.is_pending for job in self._matching([job_id]).values()):
            self.dependencies[job_id] = dependency

    def throttle(self, job_id: str, most: int) -> None:
        self._called("throttle")
        self.throttled[job_id] = most

    def shell_command(self, job_id: str, *, node: str | None = None, terminal: bool = True) -> list[str]:
        return Slurm().shell_command(job_id, node=node, terminal=terminal)

    def partitions(self) -> list[PartitionInfo]:
        self._called("partitions")
        return list(self.known_partitions)

    def failed_nodes(self, nodes: Sequence[str]) -> list[str]:
        self._called("sinfo")
        return []

    def associations(self, user: str) -> list[Association]:
        self._called("associations")
        return list(self.known_associations)

    def config(self) -> dict[str, str]:
        self._called("config")
        return {"MinJobAge": "0 sec", **self.settings}  # so that a forgotten job is gone at once

    def partition_records(self) -> list[dict[str, str]]:
        self._called("partition_records")
        return list(self.partition_rows)

    def node_records(self) -> list[dict[str, str]]:
        self._called("node_records")
        return list(self.node_rows)

    def association_table(self, user: str) -> list[dict[str, str]] | None:
        self._called("association_table")
        return list(self.association_rows) if self.accounted else None

    def qos_table(self) -> list[dict[str, str]] | None:
        self._called("qos_table")
        return list(self.qos_rows) if self.accounted else None

    def has_pyxis(self) -> bool:
        self._called("has_pyxis")
        return self.pyxis

    def _unended(self) -> int:
        return sum(not job.state.is_ended for job in self.jobs.values())

    def _called(self, name: str) -> None:
        if not self.installed:
            raise ClusterError(f"there is no Slurm on this machine (asked for {name})")
        if self.unreachable:
            kind = SlurmUnreachable if is_unreachable(self.unreachable) else SlurmCommandError
            raise kind([name], 1, self.unreachable)
        self.calls.append(name)

    def _matching(self, job_ids: Sequence[str] | None) -> dict[str, JobInfo]:
        if job_ids is None:
            return dict(self.jobs)
        wanted = set(job_ids)
        return {one: job for one, job in self.jobs.items() if one in wanted or one.partition("_")[0] in wanted}


def _is_plainly_pending(state: JobState) -> bool:
    """Whether ``scancel --state=PENDING`` cancels such a job; older versions skip jobs held after a requeue."""
    return state.is_pending and state not in (JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT)


def _array_option(text: str, args: Sequence[str]) -> list[int] | None:
    options = [*args, *(line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH "))]
    for option in options:
        if option.startswith("--array="):
            return array_indices(option.removeprefix("--array="))
    return None
