"""What the supervisor asks of whatever gave it the nodes: Slurm, or the local backend."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from hpcaccel.core.process_identity import started_at
from hpcaccel.core.records import Reason
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError, HpcaccelError, SlurmCommandError
from hpcaccel.node import batch
from hpcaccel.node.allocation.grace_requeue import requeued_at_its_end
from hpcaccel.node.launch_spec import Launch
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import JobInfo, JobState

__all__ = ["TAKEN_DOWN", "Allocation", "LocalAllocation", "Situation", "SlurmAllocation"]

TAKEN_DOWN = "the job is being taken down"
SAME_MOMENT_SECONDS = 2
_ENDS: dict[JobState | None, Reason | None] = {
    JobState.PREEMPTED: "preempted", JobState.NODE_FAIL: "lost", JobState.CANCELLED: None,
}  # fmt: skip
KILL_WAIT_SECONDS = 30.0
"""Slurm's default."""
REQUEUE_DELAYS_SECONDS = (2, 5, 10, 20, 30, 60, 0)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """How the job stands with its scheduler at this moment. Times are seconds since the epoch."""

    running: bool
    """False once the job is being taken down: by scancel, or by a preemption without grace."""
    preempted: bool = False
    """Chosen for preemption, and in its grace time if it still runs."""
    comes_back: bool = False
    """Being taken down, and the scheduler starts it again by itself, or the next job of its chain."""
    taken_for: Reason | None = None
    """Why it is taken down, where that is nobody's wish: ``preempted``, ``time_limit``, or ``lost`` with its nodes."""
    requeueable: bool = False
    """Being taken down, and ``scontrol requeue`` may still bring it back: no wish of anybody's is undone by that."""
    failed_nodes: tuple[str, ...] = ()
    """Why it is taken down, where nodes of its own failed."""
    submit_time: float | None = None
    start_time: float | None = None
    """When the job got its nodes, this time."""
    end_time: float | None = None
    known: bool = True
    """False when the scheduler could not be asked."""


class Allocation(Protocol):
    job_id: str
    jobs: Sequence[str]
    """Itself, and those of its chain that it shares its caps with."""
    restart_count: int
    nodes: list[str]

    def situation(self, *, patient: bool = True) -> Situation:
        """How it stands. ``patient``: ask again for a while where the scheduler does not answer."""
        ...

    @property
    def kill_wait_seconds(self) -> float | None:
        """How long after the signals of a preemption without grace, or of a cancel, the processes are killed."""
        ...

    def dispensable(self, nodes: Sequence[str], *, needed: int) -> list[str]:
        """Those of ``nodes`` without which the job, which needs so many nodes, could still start."""
        ...

    def step_state(self, job_id: str, step_id: str) -> JobState | None:
        """How the accounting says that a step of ranks ended, where it does."""
        ...

    def avoid(self, nodes: Sequence[str], *, instead_of: Sequence[str], now: bool = False) -> None:
        """Keep the next start of the job away from these nodes, as soon as the scheduler takes such a wish.

        Args:
            instead_of: nodes of which earlier calls may have spoken.
            now: the job is on its way back already.
        """
        ...

    def requeue(self) -> str:
        """Bring the job back through the queue. Where that works it kills the caller: returning is a failure, told
        in a sentence (empty where the scheduler requeues by itself)."""
        ...


class SlurmAllocation:
    """A Slurm job, as seen from its batch step."""

    GOES_ON_IN_DOUBT = False
    """Whether it counts as taken by the cluster where Slurm does not say that, and it may have been cancelled."""

    def __init__(self, slurm: Slurm | None = None) -> None:
        env = os.environ
        if "SLURM_JOB_ID" not in env:
            raise HpcaccelError("this program is the batch step of a Slurm job: start it with `hpcaccel submit`")
        array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
        # One task of an array has the array's own id: requeueing that would restart all tasks.
        self.job_id = f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]
        self.jobs: Sequence[str] = (self.job_id,)
        self.restart_count = int(env.get("SLURM_RESTART_COUNT", "0"))
        self.nodes = hostlist.expand(env.get("SLURM_JOB_NODELIST", ""))
        # What is said of a heterogeneous job's own number holds for all of its components; the ranks are the first.
        self._part = "+0" if "SLURM_HET_SIZE" in env else ""
        self._slurm = slurm or Slurm()
        self._avoid: tuple[Sequence[str], Sequence[str]] = ((), ())

    def situation(self, *, patient: bool = True) -> Situation:
        for delay in (1, 2, 4, 0) if patient else (0,):
            try:
                job = self._slurm.job(self.job_id)
            except SlurmCommandError:
                time.sleep(delay)
                continue
            if job is None:
                return Situation(running=False)
            # While it takes a job down to requeue it, Slurm has already counted the new start; a cancelled job
            # looks the same but for this (seen on 22.05, where PreemptTime is gone by then).
            comes_back = job.restarts > self.restart_count
            taken_for = None if job.state.is_running or comes_back else self._taken_for(job)
            return Situation(
                # Started again while this one still runs, on a node that Slurm believes dead: this one is over.
                running=job.state.is_running and not comes_back,
                preempted=_is_preempted(job),
                comes_back=comes_back,
                taken_for=taken_for,
                # Slurm refuses a cancel from here on, and has named the limit as its own reason (tried on 22.05).
                requeueable=taken_for == "time_limit" and job.reason == "TimeLimit",
                failed_nodes=self._failed_nodes() if comes_back else (),
                submit_time=job.submit_time,
                start_time=job.start_time,
                end_time=job.end_time,
            )
        return Situation(running=False, known=False)

    def _taken_for(self, job: JobInfo) -> Reason | None:
        """Why Slurm ends a job that it does not bring back; None for a cancel.

        While a job that is preempted by CANCEL is taken down its PreemptTime stays, and moves to the moment of the kill
        (22.05); of one that somebody cancels in its grace time it is older. The accounting knows, often a little later.
        """
        if job.start_time is not None and job.end_time is not None and job.time_limit_seconds is not None:  # noqa: SIM102
            if job.end_time >= job.start_time + job.time_limit_seconds:
                return "time_limit"
        if job.preempt_time is None and not self._failed_nodes():
            return None
        for delay in (1, 1, 0):
            state = self._accounted_state()
            if state in _ENDS:
                return _ENDS[state]
            if job.preempt_time is not None and abs((job.end_time or 0) - job.preempt_time) <= SAME_MOMENT_SECONDS:
                return "preempted"
            time.sleep(delay)
        doubt: Reason = "lost" if job.preempt_time is None else "preempted"
        return doubt if self.GOES_ON_IN_DOUBT else None

    def _accounted_state(self) -> JobState | None:
        try:
            entry = self._slurm.accounting([self.job_id]).get(self.job_id)
        except (ClusterError, SlurmCommandError):
            return None
        return None if entry is None else entry.state

    @cached_property
    def kill_wait_seconds(self) -> float | None:
        try:
            return float(self._slurm.config()["KillWait"].split()[0])
        except (ClusterError, SlurmCommandError, KeyError, ValueError):
            return KILL_WAIT_SECONDS

    def _failed_nodes(self) -> tuple[str, ...]:
        # Of the job itself Slurm says the same as after a preemption.
        try:
            return tuple(self._slurm.failed_nodes(self.nodes))
        except (ClusterError, SlurmCommandError):
            return ()  # it is but the name of the reason

    def dispensable(self, nodes: Sequence[str], *, needed: int) -> list[str]:
        try:
            job = self._slurm.job(self.job_id)
            sizes = {partition.name: partition.nodes for partition in self._slurm.partitions()}
        except (ClusterError, SlurmCommandError):
            return []
        if job is None:
            return []
        excluded = set(hostlist.expand(job.excluded_nodes))
        most = sizes.get(job.partition, 0) - len(excluded) - needed
        by_name = hostlist.expand(job.required_nodes)
        return [node for node in nodes if node not in by_name and node not in excluded][: max(0, most)]

    def step_state(self, job_id: str, step_id: str) -> JobState | None:
        state = None
        for delay in (1, 1, 0):
            try:
                state = self._slurm.step_state(job_id, step_id)
            except (ClusterError, SlurmCommandError):
                return None
            if state is not None and state.is_ended:
                return state
            time.sleep(delay)
        return state

    def avoid(self, nodes: Sequence[str], *, instead_of: Sequence[str], now: bool = False) -> None:
        self._avoid = (nodes, instead_of)
        if now:
            self._exclude(self.job_id)

    def _exclude(self, job_id: str) -> None:
        """Tell Slurm which nodes ``job_id``, which waits, is to keep away from, besides those that the user named."""
        nodes, before = self._avoid
        problem = ""
        for delay in (0.5, 1, 2, 0) if nodes or before else ():
            try:
                job = self._slurm.job(job_id)
                known = set(hostlist.expand(job.excluded_nodes)) if job is not None else set()
                wanted = known.difference(before).union(nodes)
                if wanted != known:
                    self._slurm.exclude(f"{job_id}{self._part}", sorted(wanted))
                return
            except (ClusterError, SlurmCommandError) as error:
                problem = str(error)
                time.sleep(delay)
        if problem:
            print(f"hpcaccel: job {job_id} cannot be kept away from {', '.join(nodes)}: {problem}", flush=True)

    def _comes_back_by_itself(self) -> bool:
        try:
            job = self._slurm.job(self.job_id)
        except SlurmCommandError:
            return False
        return job is not None and requeued_at_its_end(self._slurm, job)

    def requeue(self) -> str:
        problem = "Slurm's controller does not answer"
        for delay in REQUEUE_DELAYS_SECONDS:
            situation = self.situation()
            if situation.known and not situation.running and not situation.requeueable:
                # `scontrol requeue` would answer 0 in this state and bring a cancelled job back.
                return "" if situation.comes_back else TAKEN_DOWN
            if situation.known and (situation.requeueable or signal.SIGTERM not in signal.sigpending()):
                if situation.preempted and self._comes_back_by_itself():
                    print("hpcaccel: Slurm brings this preempted job back when its batch script ends", flush=True)
                    return ""
                try:
                    if not self._slurm.requeue(self.job_id):
                        return ""
                except ClusterError as error:
                    refusal = f"{error}. With resilience.chain the run goes on in other jobs"
                    if problem == refusal:  # it was not that the job was just being taken down
                        return refusal
                    problem = refusal
                except SlurmCommandError as error:
                    problem = str(error)
                else:
                    # Slurm excludes nodes for waiting jobs only. This one waits by now, and SIGTERM, which we block,
                    # has come: SIGKILL follows after KillWait (30 s by default). Tried on 22.05, also with arrays.
                    self._exclude(self.job_id)
                    time.sleep(60)
                    problem = "Slurm took the requeue but did not end this job within 60 seconds"
            time.sleep(delay)
        return problem


def _is_preempted(job: JobInfo) -> bool:
    """Whether Slurm has chosen this start of the job for preemption, not an earlier one."""
    return job.preempt_time is not None and job.preempt_time >= (job.start_time or 0.0)


class LocalAllocation:
    """This machine: no queue, a time limit that the supervisor keeps itself, a requeue that is a new start."""

    kill_wait_seconds = None

    def __init__(self, run: RunDir, launch: Launch) -> None:
        self.job_id = os.environ.get("HPCACCEL_LOCAL_JOB", f"local-{os.getpid():08x}")
        self.jobs: Sequence[str] = (self.job_id,)
        self.restart_count = int(os.environ.get("HPCACCEL_RESTART_COUNT", "0"))
        self.nodes = ["localhost"]
        self._script = run.script
        # A supervisor that was killed and started again has no more time than the first one.
        pid, began = batch.began() or (os.getpid(), time.time())
        self._start_time = started_at(pid)
        self._end_time = None if launch.time_limit_seconds is None else began + launch.time_limit_seconds
        self._cancelled = False

    def cancelled(self) -> None:
        """SIGTERM to the supervisor is this backend's scancel."""
        self._cancelled = True

    def dispensable(self, nodes: Sequence[str], *, needed: int) -> list[str]:
        return []  # there is no other machine

    def step_state(self, job_id: str, step_id: str) -> JobState | None:
        return None

    def avoid(self, nodes: Sequence[str], *, instead_of: Sequence[str], now: bool = False) -> None:
        pass

    def situation(self, *, patient: bool = True) -> Situation:
        return Situation(running=not self._cancelled, start_time=self._start_time, end_time=self._end_time)

    def requeue(self) -> str:
        if self._cancelled or signal.SIGTERM in signal.sigpending():
            return TAKEN_DOWN
        if batch.is_our_parent():
            os._exit(batch.START_AGAIN)
        environment = dict(os.environ, HPCACCEL_RESTART_COUNT=str(self.restart_count + 1))
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe("bash", ["bash", str(self._script)], environment)
