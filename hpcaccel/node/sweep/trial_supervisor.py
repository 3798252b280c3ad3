"""The supervisor of one trial of a sweep: a run's, in an allocation that belongs to the sweep's worker.

It does for the trial what it does for a run: ranks, ledger, restarts, stops, hangs. But what follows is the worker's
and the sweep's affair: this process requeues nothing, and whatever takes the allocation away leaves a trial that is to
be continued, by this worker or another. Its last word goes to the host, through a pipe.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpcaccel.core.records import EXIT_CONTINUED, AttemptEnd
from hpcaccel.core.run_dir import RunDir, read_json, read_lines, write_json
from hpcaccel.errors import HpcaccelError, RunBusy, RunDirectoryError, UserError
from hpcaccel.node import lease
from hpcaccel.node.allocation import Allocation, LocalAllocation, Situation, SlurmAllocation
from hpcaccel.node.control_requests import honour, pending_requests
from hpcaccel.node.decision import Verdict
from hpcaccel.node.failures.classify import Failure
from hpcaccel.node.failures.classify_logs import slurm_spoke
from hpcaccel.node.launch_spec import Launch, read_launch
from hpcaccel.node.ledger import Ledger, read_outcome
from hpcaccel.node.retry_io import THE_DISK_SAYS_NO, if_possible
from hpcaccel.node.stop_sequence import Inquiry
from hpcaccel.node.supervisor import WATCHED, Supervisor
from hpcaccel.node.sweep.shared_job_status import KILL_WAIT, WORKER_JOB, read_answer
from hpcaccel.node.sweep.slots import Slot

__all__ = ["CHECKED", "END_TIME", "HOSTS_REQUEST", "run_trial", "wait_for_a_trial"]

END_TIME = "HPCACCEL_WORKER_END"
"""Variable: when the time of a local worker is over, in seconds since the epoch."""
CHECKED = "HPCACCEL_NODES_CHECKED"
"""Variable: a trial has come to a good end in this allocation, so that its nodes need not be looked at for the next."""
HOSTS_REQUEST = "worker.json"
"""In a trial's ``control``: what its worker asks of it, for as long as this worker runs it."""
_OVER = ("completed", "pruned")
_TOLD = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}
_LONGEST = 4000


class _NoRoom(RunDirectoryError):
    """Nothing can be written to the run directory, which is no trial's fault."""


def wait_for_a_trial(*, report_to: int) -> int:
    """Be a trial's supervisor as soon as the host says on standard input which one's: a JSON object with ``run``, a
    directory, ``slot`` and ``env``. The exit code is that of a run; 0 where the host says nothing."""
    line = sys.stdin.readline()
    if not line:
        return 0
    order = json.loads(line)
    os.environ.update(order["env"])
    run = RunDir(order["run"])
    try:
        _print_to(run.slurm_log)
    except OSError as error:
        return _refuse(report_to, f"cannot write {run.slurm_log}: {error.strerror}", kind=_kind(error))
    return run_trial(run, slot=Slot.parse(order["slot"]), report_to=report_to)


def _print_to(path: Path) -> None:
    sys.stdout.flush()
    log, nothing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640), os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.close(log)
    os.close(nothing)


def run_trial(run: RunDir, *, slot: Slot, report_to: int) -> int:
    """Run a trial until its ranks have left for good, or for now; the exit code is that of a run.

    Args:
        slot: its place in the allocation.
        report_to: a file descriptor, which gets one JSON line: ``reason``, ``decision``, ``error_class``, ``detail``.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        code = _supervise(run, slot)
        end = _last_end(run)
        assert end is not None, "a supervisor has left without a line in the ledger"
        word = {name: getattr(end, name) for name in ("reason", "decision", "error_class", "detail", "nodes_excluded")}
    except (HpcaccelError, OSError) as error:
        said = str(error)
        code = _refuse(report_to, said, kind=_kind(error))
        if_possible(
            lambda: print(f"hpcaccel: {said}", flush=True), say=lambda _: None
        )  # the log may lie on a full disk
        return code
    word["detail"] = word["detail"][:_LONGEST]
    os.write(report_to, json.dumps(word).encode() + b"\n")
    return code


def _kind(error: Exception) -> str:
    if isinstance(error, RunBusy):
        return "busy"
    cause = error if isinstance(error, OSError) else error.__cause__
    unwritable = isinstance(cause, OSError) and cause.errno in THE_DISK_SAYS_NO
    return "disk" if unwritable or isinstance(error, _NoRoom) else "refused"


def _refuse(report_to: int, detail: str, *, kind: str = "refused") -> int:
    """No rank can be started; nothing of that stands in the ledger."""
    word = {"reason": "failed", "decision": "end", "error_class": kind, "detail": detail[:_LONGEST]}
    os.write(report_to, json.dumps(word).encode() + b"\n")
    return UserError.exit_code


def _supervise(run: RunDir, slot: Slot) -> int:
    launch = read_launch(run)
    if not launch.local:
        tasks = 1 if launch.launcher == "torchrun" else launch.ranks_per_node
        own = slot.srun_options(os.environ, ranks_per_node=tasks)
        launch = dataclasses.replace(launch, srun=[*own, *launch.srun], beside=slot.of > 1)
    allocation: Allocation = LocalTrialAllocation(run, launch) if launch.local else TrialAllocation()
    lease.acquire(run, job_id=allocation.job_id, restart_count=allocation.restart_count, trusted=True)
    try:
        _note_job(run, allocation.job_id)
        return TrialSupervisor(run, launch, allocation, ledger=TrialLedger.read(run)).run_attempts()
    finally:
        lease.release(run)


def _note_job(run: RunDir, job_id: str) -> None:
    record: dict[str, Any] = read_json(run.record) or {}
    if job_id not in record.get("job_ids", [])[-1:]:
        jobs = [*(one for one in record.get("job_ids", []) if one != job_id), job_id]
        write_json(run.record, {**record, "job_ids": jobs}, sync=False)


def _offset(run: RunDir) -> int:
    return int((read_json(run.record) or {}).get("ledger_offset", 0))


def _last_end(run: RunDir) -> AttemptEnd | None:
    ends = Ledger.read(run).ends
    return ends[-1] if ends else None


class TrialLedger(Ledger):
    """A trial's: it may go on in any job of the sweep's."""

    def _ends_of(self, jobs: Collection[str]) -> list[AttemptEnd]:
        # After an end, the sweep has decided that it is to be tried again: the counts begin anew.
        last = max((at for at, line in enumerate(self.ends) if line.decision in ("end", "pause")), default=-1)
        return self.ends[last + 1 :]


class TrialSupervisor(Supervisor):
    """A run's, that decides nothing beyond the allocation."""

    def __init__(self, run: RunDir, launch: Launch, allocation: Allocation, *, ledger: Ledger) -> None:
        super().__init__(run, launch, allocation, ledger=ledger)
        if path := os.environ.get(WORKER_JOB):
            self.inquiry = Inquiry(allocation, told=lambda: read_answer(Path(path)))

    def _conclude(self, code: int) -> Verdict:
        # A good end says enough by itself, and there are hundreds in a minute.
        if code == 0 and self._was_left_alone():
            return self._decide(code, Situation(running=True), None)
        return super()._conclude(code)

    def _was_left_alone(self) -> bool:
        """Whether the ranks got no signal of Slurm's: slurmstepd writes that into their log before they get it (22.05,
        26.11), and srun says in the supervisor's when a node fails."""
        self.stopping.hear_the_last()
        if self.stopping.request is not None or self.stopping.cancel_asked or signal.sigpending() & _TOLD:
            return False
        outcome = read_outcome(self.run, self.attempt)
        if outcome is not None:
            return not outcome.resume
        return not slurm_spoke(self.run, self.attempt)

    def _code_if_over(self) -> int | None:
        # Told twice to run it: a chooser died before it had heard, or written down, that the trial had ended. Where
        # more is asked of a trial than it has done, the lines before count no more.
        lines = [line for line, _ in read_lines(self.run.ledger, offset=_offset(self.run))]
        over = bool(lines) and lines[-1].get("event") == "end" and lines[-1].get("reason") in _OVER
        return 0 if over else None

    def _end_before_start(self) -> int | None:
        for name, request in pending_requests(self.run):
            if name == HOSTS_REQUEST and request.then == "requeue":
                honour(self.run, name)
                verdict = Verdict(reason=request.reason, decision="requeue", detail="before the ranks started")
                self._write_end(verdict, started=time.time())
                return EXIT_CONTINUED
        return super()._end_before_start()

    def _preflight(self) -> Verdict | None:
        if CHECKED in os.environ and not self.restarts:
            return None
        return super()._preflight()

    def _room(self) -> Failure | None:
        """
        Raises:
            _NoRoom: the sweep stops.
        """
        failure = super()._room()
        if failure is not None:
            why = f"{failure.cause.name}: {failure.detail}"
            self._write_end(Verdict(reason="stop", decision="requeue", detail=why), started=time.time())
            raise _NoRoom(why)
        return None

    def _clean(self) -> None:
        pass  # the worker does, when its last trial is over

    def _leave_excluded_nodes(self) -> int | None:
        return None  # the worker keeps away from nodes

    def _requeue(self, verdict: Verdict) -> int:
        return EXIT_CONTINUED


class TrialAllocation(SlurmAllocation):
    """The allocation of a sweep's worker, as one of its trials sees it."""

    def __init__(self) -> None:
        super().__init__()
        if given := os.environ.get(KILL_WAIT):
            self.kill_wait_seconds = float(given)

    def situation(self, *, patient: bool = True) -> Situation:
        now = super().situation(patient=patient)
        if now.running or now.comes_back or not now.known:
            return now
        # Whatever becomes of this worker: others go on with the trial.
        return dataclasses.replace(now, comes_back=True, taken_for=now.taken_for or "cancelled")


class LocalTrialAllocation(LocalAllocation):
    """The same on this machine."""

    def __init__(self, run: RunDir, launch: Launch) -> None:
        super().__init__(run, launch)
        given = os.environ.get(END_TIME)
        self._end_time = None if given is None else float(given)

    def situation(self, *, patient: bool = True) -> Situation:
        now = super().situation(patient=patient)
        return now if now.running else dataclasses.replace(now, comes_back=True, taken_for="cancelled")
