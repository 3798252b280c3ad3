"""The supervisor of one trial of a sweep: a run's supervisor in an allocation that belongs to the sweep's worker.

It handles ranks, ledger, restarts, stops and hangs as for any run. It never requeues: the worker and the sweep decide
what follows, and this worker or another one can continue a trial whose allocation is taken away. The supervisor reports
the trial's end to the worker through a pipe.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.launch_spec import LaunchSpec, read_launch
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.core.records import AttemptEnd
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.core.stop_requests import mark_honoured, open_requests
from hpcaccel.errors import HpcaccelError, RunBusy, RunDirectoryError, UserError
from hpcaccel.node import lease, samples  # noqa: F401 - imported while the process waits for a trial, not later
from hpcaccel.node.allocation import Allocation, JobStatus, LocalAllocation, Slot
from hpcaccel.node.allocation.scheduler_view import KILL_WAIT, PROCTRACK, WORKER_JOB, SchedulerView, read_shared_status
from hpcaccel.node.allocation.slurm_allocation import SlurmAllocation
from hpcaccel.node.attempt import Attempt
from hpcaccel.node.batch import WATCHED
from hpcaccel.node.decision import Verdict
from hpcaccel.node.failures import Failure, classify, hangs  # noqa: F401 - likewise
from hpcaccel.node.failures.classify_logs import slurm_intervened
from hpcaccel.node.failures.disk_space import UNWRITABLE_ERRNOS
from hpcaccel.node.ledger import Ledger, read_outcome
from hpcaccel.node.supervisor import Supervisor
from hpcaccel.node.warm.eligible_runs import KeptStep

__all__ = ["CHECKED", "END_TIME", "HOSTS_REQUEST", "run_trial", "wait_for_trials"]

log = logging.getLogger(__name__)

END_TIME = "HPCACCEL_WORKER_END"
"""Environment variable: end of a local worker's time limit, in seconds since the epoch."""
CHECKED = "HPCACCEL_NODES_CHECKED"
"""Environment variable that is set if a trial has ended well in this allocation, so that no preflight is needed."""
HOSTS_REQUEST = "worker.json"
"""File in a trial's ``control/``: the stop request from the worker that runs the trial."""
_OVER = ("completed", "pruned")
"""If a trial's last attempt ended for one of these reasons, the trial is started again only if the sweep extends it."""
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}
"""Signals that stop a trial."""
_LONGEST = 4000
"""Maximum length of ``detail`` in a report to the worker, in characters."""


class _NoRoom(RunDirectoryError):
    """The disk of the run directory stayed full or not writable. This is not the trial's fault, so the trial can
    continue later. This worker starts no more trials."""


def wait_for_trials(*, report_to: int) -> int:
    """Wait for a line on standard input, a JSON object with ``run`` (a directory), ``slot`` and ``env``, then supervise
    that trial. If its ranks have left warm parents, wait for another line: the next trial can use them. Returns the
    same exit code as ``run_trial``; 0 if standard input is closed without a line."""
    kept = KeptStep()
    code = 0
    with os.fdopen(os.dup(0), "rb") as orders:
        for line in orders:
            order = json.loads(line)
            os.environ.update(order["env"])
            run = RunDir(order["run"])
            try:
                _print_to(run.slurm_log)
            except OSError as error:
                kept.end()
                return _refuse(report_to, f"cannot write {run.slurm_log}: {error.strerror}", kind=_kind(error))
            code = run_trial(run, slot=Slot.parse(order["slot"]), report_to=report_to, kept=kept)
            if kept.step is None:
                return code
    kept.end()
    return code


def _print_to(path: Path) -> None:
    """Redirect standard output and error to ``path``, and standard input to ``/dev/null``."""
    sys.stdout.flush()
    log, nothing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640), os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.close(log)
    os.close(nothing)


def run_trial(run: RunDir, *, slot: Slot, report_to: int, kept: KeptStep) -> int:
    """Run a trial until it has ended or must continue elsewhere. Returns an exit code with the same meaning as a run's.

    Args:
        slot: the trial's share of the allocation.
        report_to: file descriptor that gets one JSON line: ``reason``, ``decision``, ``error_class``, ``detail`` and,
            unless an error prevented the trial from running, ``nodes_excluded`` and ``waits``, whether this process
            waits for another trial.
        kept: the warm parents of the trial before.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        code = _supervise(run, slot, kept)
        end = _last_end(run)
        assert end is not None, "a supervisor exited without an end line in the ledger"
        word = {name: getattr(end, name) for name in ("reason", "decision", "error_class", "detail", "nodes_excluded")}
    except (HpcaccelError, OSError) as error:
        kept.end()
        message = str(error)
        code = _refuse(report_to, message, kind=_kind(error))
        log.error(message)
        return code
    word["detail"] = word["detail"][:_LONGEST]
    word["waits"] = kept.step is not None
    os.write(report_to, json.dumps(word).encode() + b"\n")
    if kept.step is not None:
        os.kill(os.getppid(), signal.SIGCHLD)  # wakes the worker
    return code


def _kind(error: Exception) -> str:
    """The ``error_class`` to report for ``error``: ``busy``, ``disk`` or ``refused``."""
    if isinstance(error, RunBusy):
        return "busy"
    cause = error if isinstance(error, OSError) else error.__cause__
    unwritable = isinstance(cause, OSError) and cause.errno in UNWRITABLE_ERRNOS
    return "disk" if unwritable or isinstance(error, _NoRoom) else "refused"


def _refuse(report_to: int, detail: str, *, kind: str = "refused") -> int:
    """Report an error that prevents the trial from running. Returns the exit code."""
    word = {"reason": "failed", "decision": "end", "error_class": kind, "detail": detail[:_LONGEST]}
    os.write(report_to, json.dumps(word).encode() + b"\n")
    return UserError.exit_code


def _supervise(run: RunDir, slot: Slot, kept: KeptStep) -> int:
    launch = read_launch(run)
    if not launch.local:
        tasks = 1 if launch.launcher == "torchrun" else launch.ranks_per_node
        own = slot.srun_options(os.environ, ranks_per_node=tasks)
        launch = dataclasses.replace(launch, srun=[*own, *launch.srun])
    allocation: Allocation = LocalTrialAllocation(run, launch) if launch.local else TrialAllocation()
    lease.acquire(run, job_id=allocation.job_id, restart_count=allocation.restart_count, trusted=True)
    try:
        _note_job(run, allocation.job_id)
        path = os.environ.get(WORKER_JOB)
        scheduler = SchedulerView(allocation, shared=lambda: read_shared_status(Path(path)) if path else None)
        ledger = TrialLedger.of(run)
        supervisor = TrialSupervisor(run, launch, allocation, ledger=ledger, scheduler=scheduler)
        supervisor.job.warm_step = kept.take(launch)
        try:
            return supervisor.run_attempts()
        finally:
            kept.put(supervisor.job.warm_step, launch)
    finally:
        lease.release(run)


def _note_job(run: RunDir, job_id: str) -> None:
    """Write ``job_id`` to the run's record as the run's last job."""
    record: dict[str, Any] = read_json(run.record) or {}
    if job_id not in record.get("job_ids", [])[-1:]:
        jobs = [*(one for one in record.get("job_ids", []) if one != job_id), job_id]
        write_json(run.record, {**record, "job_ids": jobs}, sync=False)


def _offset(run: RunDir) -> int:
    return int((read_json(run.record) or {}).get("ledger_offset", 0))


def _last_end(run: RunDir) -> AttemptEnd | None:
    ends = Ledger.of(run).ends
    return ends[-1] if ends else None


class TrialLedger(Ledger):
    """The ledger of a trial, which may continue in any job of the sweep."""

    def ends_of(self, jobs: Collection[str]) -> list[AttemptEnd]:
        # If the sweep retries a trial that has ended, the counts that the caps limit start again from zero.
        last = max((at for at, line in enumerate(self.ends) if line.decision in ("end", "pause")), default=-1)
        return self.ends[last + 1 :]


class TrialAttempt(Attempt):
    """An attempt of a trial, in an allocation that other trials may have used before."""

    keeps_step = True

    def conclude(self, code: int) -> Verdict:
        # A successful end needs no Slurm query: short trials would cause hundreds of queries a minute.
        if code == 0 and self._was_left_alone():
            return self.decide(code, JobStatus(running=True), None)
        return super().conclude(code)

    def _was_left_alone(self) -> bool:
        """Whether the ranks ended by themselves: without a request, a pending signal or a message from Slurm.

        slurmstepd writes a line to the ranks' logs before it signals them (seen on Slurm 22.05 and 26.11), and srun
        writes one to the supervisor's log when a node fails.
        """
        self.stopping.handle_late_cancel()
        if self.stopping.request is not None or self.stopping.cancel_requested or signal.sigpending() & _STOP_SIGNALS:
            return False
        outcome = read_outcome(self.job.run, self.number)
        if outcome is not None:
            return not outcome.resume
        return not slurm_intervened(self.job.run, self.number)

    def _preflight(self) -> Verdict | None:
        if CHECKED in os.environ and not self.job.restarts:
            return None
        return super()._preflight()

    def _wait_for_room(self) -> Failure | None:
        """Wait as for a run. If time runs out, the trial can continue later, but this worker starts no more trials.

        Raises:
            _NoRoom: the disk stayed full or unwritable.
        """
        failure = super()._wait_for_room()
        if failure is not None:
            why = f"{failure.cause.name}: {failure.detail}"
            self.write_end(Verdict(reason="stop", decision="requeue", detail=why), started=time.time())
            raise _NoRoom(why)
        return None


class TrialSupervisor(Supervisor):
    """A run's supervisor that neither requeues nor cleans up the allocation."""

    attempt_class = TrialAttempt

    def _code_of_the_end(self) -> int | None:
        # If a tuner dies before it records the trial's end, the next tuner starts the trial a second time. End lines
        # before the offset do not count, because the sweep has extended the trial after them.
        run = self.job.run
        last = RunLedger.read(run, offset=_offset(run)).last
        return 0 if isinstance(last, AttemptEnd) and last.reason in _OVER else None

    def _end_before_start(self) -> int | None:
        for name, request in open_requests(self.job.run):
            if name == HOSTS_REQUEST and request.then == "requeue":
                mark_honoured(self.job.run, name)
                self._end(
                    Verdict(reason=request.reason, decision="requeue", detail="requested before the ranks started")
                )
                return EXIT_CONTINUED
        return super()._end_before_start()

    def _end_warm_step(self, verdict: Verdict) -> None:
        if verdict.decision != "end" or verdict.nodes_blamed:
            super()._end_warm_step(verdict)

    def _clean(self, verdict: Verdict) -> None:
        pass  # the worker removes staged data after its last trial

    def _leave_excluded_nodes(self) -> int | None:
        return None  # the worker excludes nodes

    def _requeue(self, verdict: Verdict) -> int:
        return EXIT_CONTINUED


class TrialAllocation(SlurmAllocation):
    """The allocation of a sweep's worker, for one of its trials."""

    def __init__(self) -> None:
        super().__init__()
        if given := os.environ.get(KILL_WAIT):
            self.kill_wait_seconds = float(given)
            self.proctrack = os.environ.get(PROCTRACK, "")

    def status(self, *, patient: bool = True) -> JobStatus:
        now = super().status(patient=patient)
        if now.running or now.will_requeue or not now.known:
            return now
        # Whatever happens to this worker, another worker can continue the trial.
        return dataclasses.replace(now, will_requeue=True, termination_reason=now.termination_reason or "cancelled")


class LocalTrialAllocation(LocalAllocation):
    """The allocation of a local worker, for one of its trials."""

    def __init__(self, run: RunDir, launch: LaunchSpec) -> None:
        super().__init__(run, launch)
        given = os.environ.get(END_TIME)
        self._end_time = None if given is None else float(given)

    def status(self, *, patient: bool = True) -> JobStatus:
        now = super().status(patient=patient)
        return now if now.running else dataclasses.replace(now, will_requeue=True, termination_reason="cancelled")
