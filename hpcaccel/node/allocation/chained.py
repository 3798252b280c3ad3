"""A job of a chain: it goes on where the job before it ended, and sees to it that others can follow.

Where a site forbids requeue, or preempts by cancelling, a run goes through several jobs of one script. They wait in the
queue, each for the end of all before it; ``RunRecord.links`` names them. A follower must be in the queue before a job
starts, since that may be killed without notice at any moment; so there are some ahead (``resilience.chain_ahead``),
and each job hands in one more when it starts. Handing all in at once would fill the queue with jobs that are rarely
needed, and count against the limits of the account; where sbatch is forbidden on nodes it is the only way.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.core.records import AttemptEnd, AttemptStart, Decision, Reason, from_dict
from hpcaccel.core.run_dir import RunDir, read_json, read_lines, write_json
from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation, LocalAllocation, Situation, SlurmAllocation
from hpcaccel.node.control_requests import cancel_was_asked
from hpcaccel.node.launch_spec import Launch, Resilience
from hpcaccel.node.ledger import Ledger
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.followers import hand_in_followers
from hpcaccel.slurm.job_dependencies import tell_dependents
from hpcaccel.slurm.states import JobState

__all__ = ["ChainedAllocation"]

NAMED_WITHIN_SECONDS = 60.0
"""A job may start before whoever submitted it has written down all links."""

_REASONS: dict[JobState, Reason] = {
    JobState.CANCELLED: "cancelled",
    JobState.PREEMPTED: "preempted",
    JobState.TIMEOUT: "time_limit",
    JobState.NODE_FAIL: "lost",
}
"""What Slurm's last word on a job says of an attempt that it killed. Anything else says nothing new."""

_BROKEN = {JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.BOOT_FAIL, JobState.LAUNCH_FAILED}


class ChainedAllocation(SlurmAllocation):
    """A Slurm job that does not come back by itself: the next one goes on."""

    GOES_ON_IN_DOUBT = True  # the next job asks again how this one ended, when that is certain

    def __init__(self, run: RunDir, limits: Resilience, slurm: Slurm | None = None) -> None:
        super().__init__(slurm)
        self._run = run
        self._length = limits.chain or 1
        self._ahead = limits.chain_ahead

    # -- its beginning ------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Take over from the job before; False where the chain has ended, and no rank may start."""
        if not self._wait_until_named():
            self._say(f"job {self.job_id} is none of this run's chain any more: ending")
            return False
        self.jobs = tuple(self._links())
        before = self._record()["job_ids"][-1:]
        if (last := self._ended(before)) is not None:
            self._say(f"the chain has ended ({last.reason}: {last.detail}); nothing to do")
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
        """Whoever submitted this job died before it could write anything down; or others carry the run by now."""
        record = self._record()
        if record["job_ids"]:
            return False
        self._write({**record, "job_ids": [self.job_id], "links": [self.job_id]})
        return True

    def _ended(self, before: Sequence[str]) -> AttemptEnd | None:
        """The end of the chain, if it has one: in the ledger, or in what Slurm says of the jobs before this one."""
        last = self._last_end()
        if last is not None and not self._is_refuted(last, before):
            return last
        ledger = Ledger.read(self._run)
        links = list(self.jobs)
        first = links.index(before[0]) if before and before[0] in links else 0
        for job_id in links[first : links.index(self.job_id)]:
            line = self._close(ledger, job_id)
            if line is not None and line.decision in ("end", "pause"):
                return line
        return None

    def _close(self, ledger: Ledger, job_id: str) -> AttemptEnd | None:
        """Write down how a job ended that could not do so itself."""
        state = self._last_word(job_id)
        started = ledger.unfinished()
        if started is not None and started.job_id == job_id:
            reason = _REASONS.get(state) if state else None
            decision: Decision = "end" if reason == "cancelled" else "requeue"
            return ledger.close_lost(self._run, reason=reason, decision=decision, why=_said(job_id, state))
        if state is JobState.CANCELLED:
            # In the queue, before its ranks started, or after its last words: nothing was to follow.
            return self._write_end(ledger, job_id, "cancelled", "end", _said(job_id, state))
        if state in _BROKEN and all(line.job_id != job_id for line in ledger.starts):
            ledger.start(AttemptStart(attempt=ledger.next_attempt, time=time.time(), job_id=job_id))
            detail = f"{_said(job_id, state)} before its ranks started; see {self._run.slurm_log}"
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
        newest = checkpoint_files.newest(self._run.checkpoints)
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
        """The end after which nothing was to follow, if one is the ledger's last word on this chain."""
        last: dict[str, Any] = {}
        for line, _ in read_lines(self._run.ledger, offset=self._record()["ledger_offset"]):
            last = line
        return from_dict(AttemptEnd, last) if last.get("decision") in ("end", "pause") else None

    def _is_refuted(self, last: AttemptEnd, before: Sequence[str]) -> bool:
        """Whether a job that was taken down held that for a cancel, and Slurm now says otherwise."""
        if last.reason != "cancelled" or cancel_was_asked(self._run) or not before:
            return False
        return self._last_word(before[0]) in _REASONS.keys() - {JobState.CANCELLED}

    def _last_word(self, job_id: str) -> JobState | None:
        """How Slurm says that a job ended; None where it does not (any more)."""
        for delay in (1, 2, 4, 0):
            try:
                job = self._slurm.job(job_id)
                if job is not None and job.state.is_ended:
                    return job.state
                entry = self._slurm.accounting([job_id]).get(job_id)
            except (ClusterError, SlurmCommandError) as error:
                self._say(f"cannot ask Slurm how job {job_id} ended: {error}")
                time.sleep(delay)
                continue
            return None if entry is None or not entry.state.is_ended else entry.state
        return None

    # -- those that follow --------------------------------------------------------------------------------------------

    def _hand_in_more(self) -> str:
        """Have as many jobs wait behind this one as there should be; why there are not, if so."""
        try:
            waiting = self._waiting()
            missing = min(self._ahead - len(waiting), self._length - len(self.jobs))
            if missing > 0:
                made = hand_in_followers(self._slurm, self._run, behind=[self.job_id, *waiting], count=missing)
                self.jobs = (*self.jobs, *made)
                self._write({**self._record(), "links": list(self.jobs)})
                self._say(f"handed in what is to follow this job: {', '.join(made)}")
                for problem in tell_dependents(self._slurm, self._run):
                    self._say(problem)
        except (ClusterError, SlurmCommandError) as error:
            problem = (
                f"cannot hand in the next job of the chain: {error}. Where that is forbidden on nodes, "
                f"resilience.chain_ahead: {self._length - 1} has submit hand in all"
            )
            self._say(problem)
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
        """One that the queue does not list: that alone says nothing."""
        job = self._slurm.job(job_id)
        return job is not None and not job.state.is_ended

    # -- its end ------------------------------------------------------------------------------------------------------

    def situation(self, *, patient: bool = True) -> Situation:
        now = super().situation(patient=patient)
        if now.taken_for is None:
            return now
        failed = self._failed_nodes() if now.taken_for == "lost" else ()
        return dataclasses.replace(now, comes_back=True, requeueable=False, failed_nodes=failed)

    def requeue(self) -> str:
        """Make sure that another job follows when this one ends; why none does, in a sentence, or empty."""
        situation = self.situation()
        if situation.known and not situation.running and not situation.comes_back:
            return TAKEN_DOWN
        try:
            if waiting := self._waiting():
                for job_id in waiting:
                    self._exclude(job_id)
                return ""
        except (ClusterError, SlurmCommandError):
            return ""  # they were there when this job started
        if behind := self._behind():
            return f"the jobs that were to follow ({', '.join(behind)}) are not in the queue any more"
        if len(self.jobs) >= self._length:
            return f"this was the last job of its chain (resilience.chain: {self._length})"
        problem = self._hand_in_more()
        for job_id in self._behind():
            self._exclude(job_id)
        return problem

    def end(self) -> None:
        """Where nothing is to follow, take the others out of the queue."""
        if self._last_end() is None:
            return
        for job_id in reversed(self._behind()):
            try:
                self._slurm.cancel(job_id, only_pending=True)
            except (ClusterError, SlurmCommandError) as error:
                self._say(f"cannot cancel job {job_id} of the chain, which will find nothing to do: {error}")

    # -- the record ---------------------------------------------------------------------------------------------------

    def _record(self) -> dict[str, Any]:
        return {"job_ids": [], "links": [], "ledger_offset": 0, **(read_json(self._run.record) or {})}

    def _links(self) -> list[str]:
        links: list[str] = self._record()["links"]
        return links

    def _write(self, record: dict[str, Any]) -> None:
        write_json(self._run.record, record)

    @staticmethod
    def _say(text: str) -> None:
        print(f"hpcaccel: {time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", flush=True)


def _said(job_id: str, state: JobState | None) -> str:
    return f"job {job_id} is over, and Slurm does not know how" if state is None else f"job {job_id} is {state.value}"


def current_allocation(run: RunDir, launch: Launch) -> Allocation:
    """The allocation of this batch step: this machine, a job of a chain, or a Slurm job."""
    if launch.local:
        return LocalAllocation(run, launch)
    if launch.resilience.chain is not None:
        return ChainedAllocation(run, launch.resilience)
    return SlurmAllocation()
