"""One attempt: a single start of the ranks, from preparation to verdict.

The supervisor makes an ``Attempt`` for each start and calls ``run``, which goes through these steps in order:

1. ``begin``: make ``attempts/<n>/`` and append the start line to the ledger.
2. ``_prepare_nodes``: wait for free disk space, import the container's image, check the nodes, stage the data. A
   verdict here ends the attempt before any rank has started.
3. ``_start``: start the components (programs beside the ranks), then the ranks.
4. ``_watch``: until the last rank has ended, wait for signals, and once a second check for requests, the time limit
   (``StopSequence``), hangs (``HangWatch``) and failed components. Samplers of GPUs and CPUs run meanwhile.
5. ``conclude``: collect the evidence: exit code, ``outcome.json``, stop request, the job's status, and after a failure
   its cause. ``decide`` turns the evidence into a verdict, subject to the run's caps.
6. ``write_end``: append the end line to the ledger.

The verdict's ``decision`` determines what the supervisor does next: restart here, requeue, pause or end.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcaccel.checkpoint_files.watched import newest_saved
from hpcaccel.core.durable_files import make_folder, read_json
from hpcaccel.core.log import log_always, set_log_file
from hpcaccel.core.records import AttemptStart
from hpcaccel.node.allocation import JobStatus
from hpcaccel.node.batch import WATCHED
from hpcaccel.node.decision import Evidence, Verdict, decide
from hpcaccel.node.failures import Failure, cause
from hpcaccel.node.failures.disk_space import WaitForRoom, explained_by_room, gone, if_possible, wait_before_start
from hpcaccel.node.failures.preflight import preflight
from hpcaccel.node.job import Job
from hpcaccel.node.launchers import RankProcesses, start_ranks
from hpcaccel.node.launchers.het_components import ComponentProcesses, component_nodes
from hpcaccel.node.ledger import read_outcome
from hpcaccel.node.preparation import BeforeRanks, Provision
from hpcaccel.node.rank import RESUME_ARGS
from hpcaccel.node.stop_sequence import StopSequence
from hpcaccel.node.warm.warm_ranks import WarmRanks
from hpcaccel.slurm.states import JobState

if TYPE_CHECKING:
    from hpcaccel.node.samples import Samplers

__all__ = ["Attempt"]

LOOK_SECONDS = 1.0
"""Interval of the checks while no signal arrives."""

log = logging.getLogger(__name__)


class Attempt:
    keeps_step = False
    """Whether the ranks' warm parents may outlive the run, for another one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.number = job.ledger.next_attempt
        self.stopping = StopSequence(job.run, job.launch, job.scheduler, attempt=self.number)
        self._provision = Provision(job.run, job.launch, watch=self._watch_step)
        self._components: ComponentProcesses | None = None
        self._samplers: Samplers | None = None
        self._started = time.time()
        self._nodes: list[str] = []
        """The nodes of the ranks."""
        self._preflight_seconds: float | None = None

    # -- from start to end ----------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """Start the ranks and watch them until they have ended. Returns the verdict."""
        job = self.job
        job.check_warm_step()
        job.prepare_submitit()
        job.scheduler.refresh()
        line = self.begin()
        size = f"ranks: {job.launch.ranks}, nodes: {len(job.placement.nodes)}"
        log_always(log, f"attempt {self.number}: {size}, checkpoint: {line.checkpoint or 'none'}")
        if (verdict := self._prepare_nodes()) is not None:
            self.write_end(verdict)
            return verdict
        ranks = self._start(line.resume_args)
        code = self._watch(ranks)
        job.warm_step = ranks.step if isinstance(ranks, WarmRanks) and ranks.kept else None
        verdict = self.conclude(code)
        if self._samplers is not None:
            self._samplers.end()
        self.write_end(verdict, exit_code=code)
        if self._components is not None and job.scheduler.over_since is None:  # otherwise Slurm ends the components
            self._components.end()
        return verdict

    def give_up(self, why: str) -> Verdict:
        """Record an attempt whose ranks are not started because supervisors keep being killed. Returns the verdict."""
        self.begin()
        self.stopping.handle_late_cancel()
        verdict = self.decide(1, self.job.scheduler.query(), Failure(cause=cause("supervisor"), detail=why))
        self.write_end(verdict)
        return verdict

    def begin(self) -> AttemptStart:
        """Make the attempt's folder, and write the start line to the ledger. Returns this line."""
        job = self.job
        job.retry_until_writable(lambda: make_folder(job.run.attempt(self.number), within=job.run.path))
        set_log_file(job.run.supervisor_log(self.number))
        newest = newest_saved(job.run, job.ledger.ends)
        self._started, self._nodes = time.time(), job.placement.nodes
        line = AttemptStart(
            attempt=self.number,
            time=self._started,
            job_id=job.allocation.job_id,
            restart_count=job.allocation.restart_count,
            nodes=self._nodes,
            ranks=job.launch.ranks,
            checkpoint=newest.name if newest else None,
            checkpoint_step=newest.step if newest else None,
            resume_args=[] if newest is None else job.resume_args(newest),
            queued_at=job.scheduler.queued_at,
            allocated_at=job.scheduler.allocated_at,
            warm=job.warm_step is not None and job.warm_step.warm,
        )
        job.retry_until_writable(lambda: job.ledger.start(line))
        return line

    def write_end(self, verdict: Verdict, *, exit_code: int | None = None, started: float | None = None) -> None:
        """Write the end line to the ledger.

        Args:
            started: start of the recorded duration (seconds since the epoch); default: the attempt's start.
        """
        self.job.write_end(
            self.job.end_line(
                verdict,
                attempt=self.number,
                started=started or self._started,
                exit_code=exit_code,
                preflight_seconds=self._preflight_seconds,
            )
        )

    # -- before the ranks -----------------------------------------------------------------------------------------

    def _prepare_nodes(self) -> Verdict | None:
        """Check the disk, import the image, check the nodes, stage the data. Returns None if the ranks may start, else
        the verdict."""
        failure = self._wait_for_room() or self._provision.image()
        if failure is None and self.stopping.request is None:
            if (verdict := self._preflight()) is not None:
                return verdict
            failure = self._provision.stage(avoid=self.job.placement.others)
        if failure is None and self.stopping.request is None:
            return None
        self.stopping.handle_late_cancel()
        return self.decide(1, self.job.scheduler.query(), failure)

    def _wait_for_room(self) -> Failure | None:
        """Wait while the disk is full or not writable. Returns a failure if time runs out, else None."""
        ends = self.job.ledger.ends
        checks = self.job.launch.resilience.preflight != "off"
        wait = wait_before_start(self.job.run, ends[-1] if ends else None, checks=checks)
        if wait is None:
            return None
        self._watch_step(wait)
        return None if self.stopping.request is not None else wait.failure()

    def _preflight(self) -> Verdict | None:
        """Check the nodes. Returns None if the ranks may start on them, else the verdict.

        Before a warm restart the nodes are checked only if the last attempt has cast suspicion on one of them."""
        placement = self.job.placement
        ends = self.job.ledger.ends
        if self.job.warm_step is not None and not (ends and ends[-1].nodes_blamed):
            return None
        checked = preflight(
            self.job.run,
            self._provision.launch,
            attempt=self.number,
            nodes=placement.nodes,
            avoid=placement.others,
            overlap=placement.has_lost_nodes,
        )
        self._preflight_seconds = checked.seconds
        if (failure := checked.failure(placement.nodes)) is None:
            return None
        verdict = self.decide(1, self.job.scheduler.query(), failure)
        if verdict.reason == "failed" and failure.nodes and not verdict.exclude:
            log.info("starting anyway: %s cannot be excluded", ", ".join(failure.nodes))
            return None
        return verdict

    def _watch_step(self, step: BeforeRanks | WaitForRoom) -> int:
        while (code := step.poll()) is None:
            received = signal.sigtimedwait(WATCHED, LOOK_SECONDS)
            self.stopping.update(step, received.si_signo if received else None)
        return code

    # -- the ranks ------------------------------------------------------------------------------------------------

    def _start(self, resume_args: Sequence[str]) -> RankProcesses:
        job, launch = self.job, self._provision.launch
        nodes, others = job.placement.nodes, job.placement.others
        where = component_nodes(job.launch, os.environ, nodes)
        env = {"HPCACCEL_ATTEMPT": str(self.number), **self._provision.env, **where}
        if resume_args:
            env[RESUME_ARGS] = json.dumps(list(resume_args))
        if job.scheduler.end_time is not None:
            env["HPCACCEL_DEADLINE"] = repr(job.scheduler.end_time)
        self._components = ComponentProcesses(job.run, launch, attempt=self.number, env=env)
        return start_ranks(
            job.run,
            launch,
            attempt=self.number,
            nodes=nodes,
            avoid=others,
            overlap=job.placement.has_lost_nodes,
            env=env,
            step=job.warm_step,
            keep=job.has_warm_parents(another_run=self.keeps_step),
            always=self.keeps_step and launch.cooperative,
        )

    def _watch(self, ranks: RankProcesses) -> int:
        """Watch the ranks until they have ended. Returns their exit code."""
        # Imported now: earlier, the ranks would start later; and at a failure, node.pyz may be unreadable for a while.
        import hpcaccel.node.failures.classify  # noqa: F401
        from hpcaccel.node.failures.hangs import HangWatch
        from hpcaccel.node.samples import Samplers

        setting = self.job.launch.resilience.hang_timeout_seconds
        hangs = HangWatch(self.job.run, self.number, setting=setting)
        placement = self.job.placement
        self._samplers = Samplers(
            self.job.run, self.job.launch, attempt=self.number, nodes=placement.nodes, avoid=placement.others
        )
        while (code := ranks.poll()) is None:
            received = signal.sigtimedwait(WATCHED, LOOK_SECONDS)
            self.stopping.update(ranks, received.si_signo if received else None)
            if hangs.look(ranks, judging=self.stopping.unlimited):
                self.stopping.kill(ranks)
            if self.stopping.unlimited and (failed := self._failed_component()) is not None:
                log.info("killing the ranks: %s", failed)
                self.stopping.kill(ranks)
            if self.stopping.unlimited:
                self._samplers.start_when_due()
                self.job.watch_batch_host()
        self._samplers.stop()
        return code

    def _failed_component(self) -> str | None:
        return None if self._components is None else self._components.failed()

    # -- the result -----------------------------------------------------------------------------------------------

    def conclude(self, code: int) -> Verdict:
        """The verdict on ranks that have ended with exit code ``code``."""
        self.stopping.handle_late_cancel()
        # A cancel takes effect whatever Slurm reports, so a query that fails need not be repeated.
        status = self.job.scheduler.query(patient=not self.stopping.cancel_requested)
        # If Slurm terminates the job, its reason takes precedence over the logs, and there is no time to read them.
        explained = status.known and not status.running
        failure = None
        if code and not explained:
            failure = self._lost_nodes() or self.find_cause(code)
        return self.decide(code, status, failure)

    def _lost_nodes(self) -> Failure | None:
        """The failure of an attempt whose job has lost some of the ranks' nodes. All else is a consequence."""
        lost = self.job.placement.lost(self._nodes)
        if not lost:
            return None
        detail = f"node failure: {', '.join(lost)}; the job continues on its other nodes"
        return Failure(cause=cause("node_failure"), detail=detail, nodes=lost)

    def decide(self, code: int, status: JobStatus, failure: Failure | None) -> Verdict:
        """The verdict from all evidence, with the run's caps applied. Excludes the nodes that the verdict names."""
        job = self.job
        if failure is not None:  # no secret may get into the ledger, the list of excluded nodes or a sweep's journal
            failure = dataclasses.replace(failure, detail=job.mask(failure.detail))
        excludable, spare = job.placement.excludable(status.failed_nodes or (failure.nodes if failure else ()))
        verdict = decide(
            Evidence(
                exit_code=code,
                outcome=read_outcome(job.run, self.number),
                stop=self.stopping.request,
                status=status,
                cancel_requested=self.stopping.cancel_requested,
                can_requeue=bool(job.launch.resilience.requeue),
                restarts_left=job.launch.resilience.restart_in_place - job.restarts,
                failure=failure,
                excludable=excludable,
                spare=spare,
                enough_nodes=job.placement.is_complete,
                has_checkpoint=newest_saved(job.run, job.ledger.ends) is not None,
                results=job.has_results(),
            )
        )
        if verdict.decision in ("restart", "requeue"):
            line = job.end_line(verdict, attempt=self.number, exit_code=code)
            cap = job.ledger.cap(job.allocation.jobs, job.launch.resilience, last=line)
            if cap is not None:
                detail = f"{cap}; the last one: {verdict.detail}" if verdict.detail else cap
                verdict = dataclasses.replace(verdict, decision="end", detail=detail, exclude=())
        if verdict.exclude:
            self._exclude(verdict.exclude, why=verdict.error_class or "", detail=verdict.detail)
        return verdict

    def _exclude(self, nodes: Sequence[str], *, why: str, detail: str) -> None:
        placement = self.job.placement
        if_possible(lambda: placement.exclude(nodes, why=why, detail=detail, attempt=self.number))
        log.info("excluding %s: %s", ", ".join(nodes), why)

    def find_cause(self, code: int) -> Failure:
        """The cause of the ranks' failure, from components, disk, logs and accounting.

        Raises:
            RunDirectoryError: the run directory is gone.
        """
        run = self.job.run
        if (failed := self._failed_component()) is not None:
            return Failure(cause=cause("component"), detail=failed)  # failures of the ranks are consequences
        if not run.path.is_dir():
            raise gone(run)
        failure = explained_by_room(run, self._classify(code))
        step = read_json(run.attempt(self.number) / "step.json")
        if failure.cause.name == "killed" and step is not None and self.job.warm_step is None:
            # The accounting may show that the step ran out of memory.
            return self._classify(code, self.job.allocation.step_state(step["job_id"], step["step_id"]))
        return failure

    def _classify(self, code: int, step_state: JobState | None = None) -> Failure:
        from hpcaccel.node.failures.classify import classify

        launch = self.job.launch
        failure = classify(
            self.job.run,
            attempt=self.number,
            exit_code=code,
            nodes=self.job.placement.nodes,
            ranks_per_node=launch.ranks_per_node,
            step_state=step_state,
            in_container=launch.container is not None,
        )
        # Mask secrets before text is appended: a truncated secret is recognised only at the end of a text.
        return dataclasses.replace(failure, detail=self.job.mask(failure.detail))
