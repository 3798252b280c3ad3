"""A job of a chain: continues the run where the previous job ended, and submits the jobs that follow.

If a site forbids requeue, or preempts by cancelling, a run can use several jobs of one script. They are pending in the
queue, each dependent on the end of all earlier ones; ``RunRecord.links`` lists them. The next job must be in the queue
before a job starts, because a job may be killed without notice at any moment. So some jobs are submitted in advance
(``resilience.chain_ahead``), and each job submits one more when it starts. Submitting all jobs at once would fill the
queue with jobs that are rarely needed and count against the account's limits, but it is the only way on clusters that
forbid sbatch on nodes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from hpcaccel.checkpoint_files.watched import newest_saved
from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.launch_spec import LaunchSpec, RestartPolicy
from hpcaccel.core.records import AttemptEnd, AttemptStart, Decision, Reason
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.core.stop_requests import cancel_was_requested
from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation, JobStatus
from hpcaccel.node.allocation.slurm_allocation import SlurmAllocation, unchained_allocation
from hpcaccel.node.ledger import Ledger
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.job_dependencies import submit_followers, update_dependents
from hpcaccel.slurm.states import JobState

__all__ = ["ChainedAllocation", "current_allocation"]

log = logging.getLogger(__name__)

NAMED_WITHIN_SECONDS = 60.0
"""How long a job waits until the run's record lists it. A job may start before the submitting command has recorded its
ID."""

_REASONS: dict[JobState, Reason] = {
    JobState.CANCELLED: "cancelled",
    JobState.PREEMPTED: "preempted",
    JobState.TIMEOUT: "time_limit",
    JobState.NODE_FAIL: "lost",
}
"""Why an attempt was killed, by the final state of its job. Other states give no reason."""

_BROKEN = {JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.BOOT_FAIL, JobState.LAUNCH_FAILED}
"""Final states of a failed job. If the ledger has no start line for the job, it failed before its ranks started."""


class ChainedAllocation(SlurmAllocation):
    """A Slurm job that is never requeued: the next job of the chain continues the run."""

    chained = True
    GOES_ON_IN_DOUBT = True  # the next job queries this job's final state again, when Slurm reports it reliably

    def __init__(self, run: RunDir, limits: RestartPolicy, slurm: Slurm | None = None) -> None:
        super().__init__(slurm)
        self._run = run
        self._length = limits.chain or 1
        self._ahead = limits.chain_ahead

    # -- start --------------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Take over the run from the previous job, and submit further jobs. Returns False if the chain has ended or
        does not include this job."""
        if not self._wait_until_named():
            log.info(f"job {self.job_id} is not part of this run's chain: exiting")
            return False
        self.jobs = tuple(self._links())
        before = self._record()["job_ids"][-1:]
        if (last := self._ended(before)) is not None:
            detail = f": {last.detail}" if last.detail else ""
            log.info(f"the chain has ended ({last.reason}{detail}): exiting")
            return False
        record = self._record()
        if before != [self.job_id]:
            self._write({**record, "job_ids": [*record["job_ids"], self.job_id]})
        self._hand_in_more()
        return True

    def _wait_until_named(self) -> bool:
        end = time.monotonic() + NAMED_WITHIN_SECONDS
        while self.job_id not in self._links():
            if time.monotonic() > end:
                return self._begin_alone()
            time.sleep(0.5)
        return True

    def _begin_alone(self) -> bool:
        """Record this job as the chain's first if the submitting command died before it recorded a job. Returns False
        if other jobs are recorded."""
        record = self._record()
        if record["job_ids"]:
            return False
        self._write({**record, "job_ids": [self.job_id], "links": [self.job_id]})
        return True

    def _ended(self, before: Sequence[str]) -> AttemptEnd | None:
        """The end line that ends the chain, from the ledger or from earlier jobs' final states; None if the chain
        continues. Writes the end lines that the earlier jobs did not write themselves.

        Args:
            before: a list of one ID, that of the last job that took over the run; empty if no job has.
        """
        last = self._last_end()
        if last is not None and not self._is_refuted(last, before):
            return last
        ledger = Ledger.of(self._run)
        links = list(self.jobs)
        first = links.index(before[0]) if before and before[0] in links else 0
        for job_id in links[first : links.index(self.job_id)]:
            line = self._close(ledger, job_id)
            if line is not None and line.decision in ("end", "pause"):
                return line
        return None

    def _close(self, ledger: Ledger, job_id: str) -> AttemptEnd | None:
        """Write the end line of an earlier job if it is missing. Returns the written line, or None."""
        state = self._final_state(job_id)
        started = ledger.unfinished()
        if started is not None and started.job_id == job_id:
            reason = _REASONS.get(state) if state else None
            decision: Decision = "end" if reason == "cancelled" else "requeue"
            return ledger.close_lost(self._run, reason=reason, decision=decision, why=_state_text(job_id, state))
        if state is JobState.CANCELLED:
            # Cancelled in the queue, before its ranks started, or after it wrote its end line: no job may follow.
            return self._write_end(ledger, job_id, "cancelled", "end", _state_text(job_id, state))
        if state in _BROKEN and all(line.job_id != job_id for line in ledger.starts):
            ledger.start(AttemptStart(attempt=ledger.next_attempt, time=time.time(), job_id=job_id))
            detail = f"{_state_text(job_id, state)} before its ranks started; see {self._run.slurm_log}"
            return self._write_end(ledger, job_id, "failed", "requeue", detail, attempt=ledger.starts[-1].attempt)
        return None

    def _write_end(
        self,
        ledger: Ledger,
        job_id: str,
        reason: Reason,
        decision: Decision,
        detail: str,
        *,
        attempt: int | None = None,
    ) -> AttemptEnd:
        newest = newest_saved(self._run, ledger.ends)
        line = AttemptEnd(
            attempt=attempt or ledger.next_attempt,
            time=time.time(),
            job_id=job_id,
            reason=reason,
            decision=decision,
            detail=detail,
            checkpoint=newest.name if newest else None,
            checkpoint_step=newest.step if newest else None,
        )
        ledger.end(line)
        return line

    def _last_end(self) -> AttemptEnd | None:
        """The newest ledger line of this chain if it ends or pauses the run, else None."""
        return RunLedger.read(self._run, offset=self._record()["ledger_offset"]).settled

    def _is_refuted(self, last: AttemptEnd, before: Sequence[str]) -> bool:
        """Whether the previous job recorded a cancel, but Slurm's final state of that job shows another reason."""
        if last.reason != "cancelled" or cancel_was_requested(self._run) or not before:
            return False
        return self._final_state(before[0]) in _REASONS.keys() - {JobState.CANCELLED}

    def _final_state(self, job_id: str) -> JobState | None:
        """The final state of a job, or None if Slurm does not report one."""
        for delay in (1, 2, 4, 0):
            try:
                job = self._slurm.job(job_id)
                if job is not None and job.state.is_ended:
                    return job.state
                entry = self._slurm.accounting([job_id]).get(job_id)
            except (ClusterError, SlurmCommandError) as error:
                log.warning(f"cannot query Slurm for the final state of job {job_id}: {error}")
                time.sleep(delay)
                continue
            return None if entry is None or not entry.state.is_ended else entry.state
        return None

    # -- following jobs -----------------------------------------------------------------------------------------------

    def _hand_in_more(self) -> str:
        """Submit jobs until ``chain_ahead`` jobs are pending after this one, or until the chain has its full length.
        Returns the problem, or an empty string."""
        try:
            waiting = self._waiting()
            missing = min(self._ahead - len(waiting), self._length - len(self.jobs))
            if missing > 0:
                made = submit_followers(self._slurm, self._run, behind=[self.job_id, *waiting], count=missing)
                self.jobs = (*self.jobs, *made)
                self._write({**self._record(), "links": list(self.jobs)})
                log.info(f"submitted {'job' if len(made) == 1 else 'jobs'} {', '.join(made)} to continue the chain")
                for problem in update_dependents(self._slurm, self._run):
                    log.warning(problem)
        except (ClusterError, SlurmCommandError) as error:
            problem = (
                f"cannot submit the next job of the chain: {error}. If sbatch is forbidden on nodes, set "
                f"resilience.chain_ahead: {self._length - 1}, so that `hpcaccel submit` submits all jobs of the chain"
            )
            log.warning(problem)
            return problem
        return ""

    def _behind(self) -> list[str]:
        links = self._links()
        return links[links.index(self.job_id) + 1 :] if self.job_id in links else []

    def _waiting(self) -> list[str]:
        behind = self._behind()
        queued = self._slurm.queue(behind) if behind else {}
        return [job_id for job_id in behind if job_id in queued or self._is_alive(job_id)]

    def _is_alive(self, job_id: str) -> bool:
        """Whether a job that squeue does not list still exists. Its absence from squeue alone is not conclusive."""
        job = self._slurm.job(job_id)
        return job is not None and not job.state.is_ended

    # -- end ----------------------------------------------------------------------------------------------------------

    def status(self, *, patient: bool = True) -> JobStatus:
        now = super().status(patient=patient)
        if now.termination_reason is None:
            return now
        failed = self._failed_nodes() if now.termination_reason == "lost" else ()
        return dataclasses.replace(now, will_requeue=True, requeueable=False, failed_nodes=failed)

    def requeue(self) -> str:
        """Make sure that another job of the chain follows. Returns why no job follows; empty if one does."""
        status = self.status()
        if status.known and not status.running and not status.will_requeue:
            return TAKEN_DOWN
        try:
            if waiting := self._waiting():
                for job_id in waiting:
                    self._exclude(job_id)
                return ""
        except (ClusterError, SlurmCommandError):
            return ""  # assume that the next jobs are still in the queue, as they were when this job started
        if behind := self._behind():
            return f"the chain's remaining jobs are no longer in the queue (submitted: {', '.join(behind)})"
        if len(self.jobs) >= self._length:
            return f"this was the last job of the chain (resilience.chain: {self._length})"
        problem = self._hand_in_more()
        for job_id in self._behind():
            self._exclude(job_id)
        return problem

    def end(self) -> None:
        """Cancel the pending jobs of the chain if the run is over or paused."""
        if self._last_end() is None:
            return
        for job_id in reversed(self._behind()):
            try:
                self._slurm.cancel(job_id, only_pending=True)
            except (ClusterError, SlurmCommandError) as error:
                log.warning(f"cannot cancel job {job_id} of the chain: {error}. It will exit without starting ranks")

    # -- record -------------------------------------------------------------------------------------------------------

    def _record(self) -> dict[str, Any]:
        return {"job_ids": [], "links": [], "ledger_offset": 0, **(read_json(self._run.record) or {})}

    def _links(self) -> list[str]:
        links: list[str] = self._record()["links"]
        return links

    def _write(self, record: dict[str, Any]) -> None:
        write_json(self._run.record, record)


def _state_text(job_id: str, state: JobState | None) -> str:
    return f"Slurm has no final state for job {job_id}" if state is None else f"job {job_id} ended as {state.value}"


def current_allocation(run: RunDir, launch: LaunchSpec) -> Allocation:
    """The allocation of this batch step: this machine, a job of a chain, or a Slurm job outside of chains."""
    if launch.resilience.chain is not None and not launch.local:
        return ChainedAllocation(run, launch.resilience)
    return unchained_allocation(run, launch)
