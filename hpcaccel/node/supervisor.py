"""The supervisor of a job: runs one attempt after another, and requeues or ends the job.

``supervise`` takes the run's lease and calls ``Supervisor.run_attempts``:

1. ``_close_lost``: an attempt without an end line was killed together with its supervisor. Write its end.
2. ``_code_if_over``: Slurm may start a job whose run is over. The job then exits with the exit code of the run's end.
3. ``_end_before_start``: check for requests made while the job was pending, unmet dependencies, and the run's caps.
4. ``_leave_excluded_nodes``: requeue a job that started on an excluded node, if that may help.
5. Run the lines of ``environment.setup_per_node``, once per node.
6. Run attempts (``attempt.py``) until one ends with a decision other than ``restart``.
7. Remove staged data, then requeue or end the job. Returns the batch step's exit code.

The process has no signal handlers. It blocks the signals in ``WATCHED`` and waits for them, so that they interrupt no
other code.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import LaunchSpec, read_launch
from hpcaccel.core.log import set_mask
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.core.records import AttemptEnd, AttemptStart, Decision
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import cancel_was_requested, mark_honoured, open_requests, pruned
from hpcaccel.node import lease
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation
from hpcaccel.node.allocation.scheduler_view import SchedulerView
from hpcaccel.node.attempt import Attempt
from hpcaccel.node.batch import WATCHED, killed_by, take_over_signals
from hpcaccel.node.chain import current_allocation
from hpcaccel.node.decision import Verdict
from hpcaccel.node.failures import cause
from hpcaccel.node.failures.disk_space import retry_until_writable
from hpcaccel.node.job import Job, exit_code_of, unmet_dependency
from hpcaccel.node.launchers import run_on_each_node
from hpcaccel.node.launchers.srun_ranks import end_lost_step
from hpcaccel.node.ledger import Ledger
from hpcaccel.node.preparation import clean_snapshots, clean_stage

__all__ = ["Supervisor", "record_killed", "record_setup_failure", "supervise"]

log = logging.getLogger(__name__)


def supervise(run: RunDir) -> int:
    """Run attempts of ``run`` until nothing is left to do in this allocation. Returns the batch step's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    take_over_signals()
    return _with_lease(run, lambda supervisor: supervisor.run_attempts())


def record_killed(run: RunDir, why: str) -> int:
    """Record that the run's supervisors keep being killed, see ``Supervisor.give_up``. Returns the batch step's exit
    code."""
    return _with_lease(run, lambda supervisor: supervisor.give_up(why))


def _with_lease(run: RunDir, work: Callable[[Supervisor], int]) -> int:
    """Call ``work`` under the run's lease, unless ``Allocation.begin`` returns False. Returns the exit code.

    Raises:
        RunBusy: see ``lease.acquire``.
    """
    launch = read_launch(run)
    allocation = current_allocation(run, launch)
    retry_until_writable(
        lambda: lease.acquire(run, job_id=allocation.job_id, restart_count=allocation.restart_count),
        run=run,
    )
    try:
        if not allocation.begin():
            last = Ledger.of(run).final_end
            return EXIT_CONTINUED if last is None else exit_code_of(last)
        return work(Supervisor(run, launch, allocation))
    finally:
        allocation.end()
        lease.release(run)


def record_setup_failure(run: RunDir, *, exit_code: int, name: str) -> int:
    """Record an attempt whose ranks never started because a set-up line failed. Returns exit code 1."""
    allocation = current_allocation(run, read_launch(run))
    ledger = Ledger.of(run)
    ledger.close_lost(run)
    attempt, now, row = ledger.next_attempt, time.time(), cause("setup")
    detail = f"{name} failed with exit code {exit_code}; see {run.slurm_log}"
    ledger.start(AttemptStart(attempt=attempt, time=now, job_id=allocation.job_id, nodes=allocation.nodes))
    ledger.end(
        AttemptEnd(
            attempt=attempt,
            time=now,
            job_id=allocation.job_id,
            reason="failed",
            decision="end",
            error_class=row.name,
            detail=detail,
            advice=row.advice,
            exit_code=exit_code,
        )
    )
    allocation.end()
    log.error("%s", detail)
    return 1


class Supervisor:
    """Runs the attempts of one job.

    Args:
        ledger: default: read from the run directory.
        scheduler: default: a ``SchedulerView`` without a shared status.
    """

    attempt_class: type[Attempt] = Attempt

    def __init__(
        self,
        run: RunDir,
        launch: LaunchSpec,
        allocation: Allocation,
        *,
        ledger: Ledger | None = None,
        scheduler: SchedulerView | None = None,
    ) -> None:
        self.job = Job(
            run=run,
            launch=launch,
            allocation=allocation,
            ledger=ledger or Ledger.of(run),
            scheduler=scheduler or SchedulerView(allocation),
        )
        self._attempt: Attempt | None = None
        """The last attempt that this supervisor began."""
        self._killed = killed_by()
        """The signal that killed the previous supervisor of the same batch step; empty if there was none."""
        set_mask(self.job.mask)

    def run_attempts(self) -> int:
        """Run attempts until one ends with a decision other than ``restart``. Returns the batch step's exit code."""
        if (lost := self._close_lost()) is not None:
            log.info(
                f"attempt {lost.attempt} was killed before it could record its end; recorded it from the attempt's "
                f"files (reason: {lost.reason})"
            )
        for check in (self._code_if_over, self._end_before_start, self._leave_excluded_nodes, self._set_up_nodes):
            if (code := check()) is not None:
                return code
        while True:
            self.job.fit_nodes()
            self.job.watch_batch_host()
            self._attempt = self.attempt_class(self.job)
            verdict = self._attempt.run()
            if verdict.decision == "restart":
                self.job.restarts += 1
                continue
            self._end_warm_step(verdict)
            self._clean(verdict)
            if verdict.decision == "requeue":
                return self._requeue(verdict)
            return exit_code_of(verdict)

    def give_up(self, why: str) -> int:
        """Record that the supervisors of this batch step keep being killed, and requeue the job if that is the verdict.
        Returns the batch step's exit code."""
        self._close_lost(given_up=why)
        if (code := self._code_if_over()) is not None:
            return code
        self.job.restarts = self.job.launch.resilience.restart_in_place  # no restart in place is left
        self._attempt = self.attempt_class(self.job)
        verdict = self._attempt.give_up(why)
        if verdict.decision != "requeue":
            return exit_code_of(verdict)
        if self.job.launch.local:
            # This process execs the batch script of the next start, and would still count as the holder of the lease.
            lease.release(self.job.run)
        return self._requeue(verdict)

    # -- before the first attempt ---------------------------------------------------------------------------------

    def _close_lost(self, *, given_up: str = "") -> AttemptEnd | None:
        """Write the end line of an attempt that lacks one. If the attempt ran in this start of the Slurm job, kill its
        ranks first. Returns the line, or None if no attempt lacks an end line.

        Args:
            given_up: why the batch step starts no further supervisor; empty if this supervisor continues.
        """
        job, start = self.job, self.job.ledger.unfinished()
        here = job.allocation.job_id, job.allocation.restart_count
        if start is None or (start.job_id, start.restart_count) != here:
            return job.retry_until_writable(lambda: job.ledger.close_lost(job.run))
        if not job.launch.local:
            end_lost_step(job.run, start.attempt)
        if not given_up and not self._killed:
            return job.retry_until_writable(lambda: job.ledger.close_lost(job.run))
        # A user's request still determines what follows. Without a request the ranks restart in this allocation.
        decision: Decision | None = None if given_up or cancel_was_requested(job.run) else "restart"
        why = given_up or f"signal {self._killed}; restarted in the same job"
        return job.retry_until_writable(
            lambda: job.ledger.close_lost(job.run, decision=decision, killed="the supervisor", why=why)
        )

    def _code_if_over(self) -> int | None:
        """The exit code if the run, or the run's part in this job, is already over; else None.

        If the run has ended, the code is that of its end, so that dependent jobs do not take a failure for a success.
        """
        code = self._code_of_the_end()
        if code is not None:
            log.info("the run, or its part in this job, has already ended: exiting with code %d", code)
        return code

    def _code_of_the_end(self) -> int | None:
        job = self.job
        jobs = (read_json(job.run.record) or {}).get("job_ids", [])
        if job.allocation.job_id in jobs[:-1]:
            return EXIT_CONTINUED  # the run was resumed in another job while this one was pending after its requeue
        last = job.ledger.ended_by(job.allocation.job_id)
        if last is None:
            return None
        if last.reason == "cancelled" and not cancel_was_requested(job.run):
            # A cancel inferred from signals alone is a guess. The guess was wrong if Slurm has started the job again.
            return None
        return exit_code_of(last)

    def _end_before_start(self) -> int | None:
        """Check for requests made while the job was pending, unmet dependencies and caps. Returns an exit code if the
        job ends here, else None."""
        job = self.job
        for name, request in open_requests(job.run):
            if request.then in ("cancel", "pause") or pruned(request):
                mark_honoured(job.run, name)
                decision: Decision = "pause" if request.then == "pause" and not pruned(request) else "end"
                return self._end(
                    Verdict(reason=request.reason, decision=decision, detail="requested before the ranks started")
                )
            if request.then == "requeue":
                mark_honoured(job.run, name)  # nothing to do: the job has just started, and no ranks are running
        if not job.ledger.starts and (why := unmet_dependency(job.launch)):
            row = cause("dependency")
            return self._end(
                Verdict(reason="cancelled", decision="end", error_class=row.name, detail=why, advice=row.advice)
            )
        if (cap := job.ledger.cap(job.allocation.jobs, job.launch.resilience)) is not None:
            return self._end(Verdict(reason="failed", decision="end", error_class="cap", detail=cap))
        return None

    def _end(self, verdict: Verdict) -> int:
        """Write an end line to the ledger for the next attempt, whose ranks are not started. Returns the exit code."""
        self.job.write_end(self.job.end_line(verdict))
        return exit_code_of(verdict)

    def _leave_excluded_nodes(self) -> int | None:
        """Requeue the job if it has started on a node that the run excludes and a requeue may help. Returns the exit
        code, or None if the job continues."""
        placement = self.job.placement
        bad = placement.misplaced()
        if not bad:
            return None
        if not placement.worth_leaving(bad):
            log.info("starting on %s despite the exclusion: see %s", ", ".join(bad), self.job.run.excluded_nodes)
            return None
        detail = f"started on {', '.join(bad)}, which the run excludes"
        log.info("%s", detail)
        return self._requeue(Verdict(reason="failed", decision="requeue", detail=detail))

    def _set_up_nodes(self) -> int | None:
        self.job.watch_batch_host()  # the lines may take long
        launch = self.job.launch
        # Spare nodes are set up, too: a failure may move the ranks to them.
        nodes = len(self.job.allocation.nodes) if launch.resilience.outlives_nodes else launch.nodes
        for line in launch.setup_per_node:
            if failed := run_on_each_node(line, launch=launch, nodes=nodes):
                name = f"environment.setup_per_node: {line}"
                return record_setup_failure(self.job.run, exit_code=failed, name=name)
        return None

    # -- after the last attempt -----------------------------------------------------------------------------------

    def _end_warm_step(self, verdict: Verdict) -> None:
        self.job.end_warm_step()

    def _clean(self, verdict: Verdict) -> None:
        """Remove staged data; after a failure also the snapshots in memory, which otherwise the ranks remove."""
        if self.job.scheduler.over_since is not None:
            return  # Slurm starts no further steps in this job
        self.job.fit_nodes()
        steps = (
            [clean_stage, clean_snapshots] if (verdict.reason, verdict.decision) == ("failed", "end") else [clean_stage]
        )
        for clean in steps:
            if problem := clean(self.job.run, self.job.launch, avoid=self.job.placement.others):
                log.warning("%s", problem)

    def _requeue(self, verdict: Verdict) -> int:
        allocation, placement = self.job.allocation, self.job.placement
        if verdict.by_scheduler and not allocation.chained:
            log.info("the scheduler is requeueing this job")
            if verdict.exclude:
                placement.update_scheduler(now=True)
            return EXIT_CONTINUED
        log.info("the next job of the chain continues the run" if allocation.chained else "requeueing the job")
        placement.update_scheduler()
        if problem := allocation.requeue():
            detail = f"not requeued: {problem}"
            self._end_again(
                Verdict(reason="cancelled", decision="end", detail=detail)
                if problem == TAKEN_DOWN
                else Verdict(reason=verdict.reason, decision="pause", detail=detail)
            )
        return EXIT_CONTINUED

    def _end_again(self, verdict: Verdict) -> None:
        """Write an end line that replaces that of the last attempt. If no attempt has begun, write the end line of the
        next attempt, whose ranks are not started."""
        if self._attempt is None:
            self._end(verdict)
        else:
            self._attempt.write_end(verdict, started=time.time())
