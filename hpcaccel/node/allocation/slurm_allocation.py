"""A Slurm job as seen from its batch step: its status, the reason for its termination, and its requeue.

A preempted job can be requeued in two ways. ``scontrol requeue`` works while the job runs. Since 24.05 Slurm also
requeues a job itself when the batch script ends in the grace time. For this Slurm sets a flag on the job at the start
of the grace time (GRACE_PREEMPT, see job_complete in slurmctld), and this requeue clears the flag. ``scontrol requeue``
does not clear it: Slurm would take the end of the next start for the end of the preemption, and start the job once
more. Slurm counts the requeues at a script's end, and holds the job at the MaxBatchRequeue-th one ("launch failure
limit exceeded requeued held"). It does not count uses of ``scontrol requeue``, so that command is used once the count
comes close to this limit.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from functools import cached_property

from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.records import Reason
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError, HpcaccelError, SlurmCommandError
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation, JobStatus, LocalAllocation
from hpcaccel.node.allocation.requeue_at_end import requeued_at_its_end
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import JobInfo, JobState

__all__ = ["SlurmAllocation", "unchained_allocation"]

SAME_MOMENT_SECONDS = 2
"""If a job's end differs from its PreemptTime by no more than this, the preemption ended the job."""
_ENDS: dict[JobState | None, Reason | None] = {
    JobState.PREEMPTED: "preempted", JobState.NODE_FAIL: "lost", JobState.CANCELLED: None,
}  # fmt: skip
"""Why a job was terminated, by its final state in Slurm's accounting. The value None stands for a user's cancel."""
KILL_WAIT_SECONDS = 30.0
"""Slurm's default for KillWait."""
REQUEUE_DELAYS_SECONDS = (2, 5, 10, 20, 30, 60, 0)
"""The delay after each try to requeue the job, in order."""

log = logging.getLogger(__name__)


class SlurmAllocation:
    """A Slurm job, as seen from its batch step."""

    chained = False
    status_is_free = False
    GOES_ON_IN_DOUBT = False
    """Whether to assume a preemption or a lost node if Slurm gives no reason, although the user may have cancelled the
    job."""

    def __init__(self, slurm: Slurm | None = None) -> None:
        env = os.environ
        if "SLURM_JOB_ID" not in env:
            raise HpcaccelError(
                "SLURM_JOB_ID is not set: this program is the batch step of a job. Start it with `hpcaccel submit`"
            )
        array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
        # In one task of an array SLURM_JOB_ID is the array's own ID: a requeue of that ID would restart all tasks.
        self.job_id = f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]
        self.jobs: Sequence[str] = (self.job_id,)
        self.restart_count = int(env.get("SLURM_RESTART_COUNT", "0"))
        self.nodes = hostlist.expand(env.get("SLURM_JOB_NODELIST", ""))
        # An update to a heterogeneous job's plain ID applies to all of its components. The ranks are component 0.
        self._part = "+0" if "SLURM_HET_SIZE" in env else ""
        self._slurm = slurm or Slurm()
        self._avoid: tuple[Sequence[str], Sequence[str]] = ((), ())

    def begin(self) -> bool:
        return True

    def end(self) -> None:
        pass

    def terminated(self) -> None:
        pass  # the next status shows what the signal means

    def status(self, *, patient: bool = True) -> JobStatus:
        for delay in (1, 2, 4, 0) if patient else (0,):
            try:
                job = self._slurm.job(self.job_id)
            except SlurmCommandError:
                time.sleep(delay)
                continue
            if job is None:
                return JobStatus(running=False)
            self._without_lost_nodes(job)
            # While Slurm terminates a job to requeue it, the count of restarts already includes the next start. Only
            # this shows that the job is not cancelled (seen on 22.05, where PreemptTime is already unset).
            will_requeue = job.restarts > self.restart_count
            termination_reason = None if job.state.is_running or will_requeue else self._find_termination_reason(job)
            return JobStatus(
                # If Slurm considers this node dead, it may restart the job while this start runs, which must then end.
                running=job.state.is_running and not will_requeue,
                preempted=_is_preempted(job),
                will_requeue=will_requeue,
                termination_reason=termination_reason,
                # While Slurm ends a job at its limit, it refuses a cancel, and reports the limit as the reason (22.05).
                requeueable=termination_reason == "time_limit" and job.reason == "TimeLimit",
                failed_nodes=self._failed_nodes() if will_requeue else (),
                submit_time=job.submit_time,
                start_time=job.start_time,
                end_time=job.end_time,
            )
        return JobStatus(running=False, known=False)

    def _without_lost_nodes(self, job: JobInfo) -> None:
        """Remove nodes that the job no longer has: Slurm takes a failed node away from a job with --no-kill."""
        if self._part or not job.state.is_running or job.restarts != self.restart_count or not job.nodes:
            return
        left = set(hostlist.expand(job.nodes))
        if left < set(self.nodes):
            log.warning("the job has lost: %s", ", ".join(node for node in self.nodes if node not in left))
            self.nodes = [node for node in self.nodes if node in left]

    def _find_termination_reason(self, job: JobInfo) -> Reason | None:
        """Why Slurm terminates a job without requeueing it; None for a user's cancel.

        In a preemption by CANCEL, PreemptTime moves to the time of the kill (22.05). If a user cancels the job in its
        grace time, PreemptTime is older than the kill. The final state often appears in the accounting a little later.
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
    def _config(self) -> dict[str, str]:
        try:
            return self._slurm.config()
        except (ClusterError, SlurmCommandError):
            return {}

    @cached_property
    def kill_wait_seconds(self) -> float | None:
        try:
            return float(self._config["KillWait"].split()[0])
        except (KeyError, IndexError, ValueError):
            return KILL_WAIT_SECONDS

    @cached_property
    def proctrack(self) -> str:
        return self._config.get("ProctrackType", "")

    def _failed_nodes(self) -> tuple[str, ...]:
        # The job's own state does not show a node failure: it is the same as after a preemption.
        try:
            return tuple(self._slurm.failed_nodes(self.nodes))
        except (ClusterError, SlurmCommandError):
            return ()  # without the nodes, only the reported reason is less exact

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
        """Update the excluded nodes of the pending job ``job_id``. Nodes that the user excluded stay excluded."""
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
            wanted_text = ", ".join(nodes) or "none"
            log.warning(
                "cannot change the excluded nodes of job %s (nodes that hpcaccel wants to exclude: %s): %s",
                job_id,
                wanted_text,
                problem,
            )

    def _returns_by_itself(self) -> bool:
        try:
            job = self._slurm.job(self.job_id)
        except SlurmCommandError:
            return False
        return job is not None and requeued_at_its_end(self._slurm, job)

    def requeue(self) -> str:
        problem = "the Slurm controller does not respond"
        for delay in REQUEUE_DELAYS_SECONDS:
            status = self.status()
            if status.known and not status.running and not status.requeueable:
                # In this state `scontrol requeue` would exit with 0 and requeue a cancelled job.
                return "" if status.will_requeue else TAKEN_DOWN
            if status.known and (status.requeueable or signal.SIGTERM not in signal.sigpending()):
                if status.preempted and self._returns_by_itself():
                    log.info("Slurm requeues this preempted job when its batch script ends")
                    return ""
                try:
                    if not self._slurm.requeue(self.job_id):
                        return ""
                except ClusterError as error:
                    refusal = f"{error}. Set resilience.chain to continue the run in further jobs instead"
                    if problem == refusal:  # refused twice: not just because the job was ending
                        return refusal
                    problem = refusal
                except SlurmCommandError as error:
                    problem = str(error)
                else:
                    # Slurm excludes nodes for pending jobs only, and this job is pending now. Slurm has sent SIGTERM,
                    # which is blocked here, and sends SIGKILL after KillWait (30 s by default). Tested on 22.05, with
                    # arrays too.
                    self._exclude(self.job_id)
                    time.sleep(60)
                    problem = "Slurm accepted the requeue but did not end this job within 60 seconds"
            time.sleep(delay)
        return problem


def _is_preempted(job: JobInfo) -> bool:
    """Whether Slurm has chosen the current start of the job for preemption, not an earlier start."""
    return job.preempt_time is not None and job.preempt_time >= (job.start_time or 0.0)


def unchained_allocation(run: RunDir, launch: LaunchSpec) -> Allocation:
    """The allocation of this batch step: this machine, or a Slurm job."""
    return LocalAllocation(run, launch) if launch.local else SlurmAllocation()
