"""A sweep's worker: the process that runs trials in one allocation, one after another in each slot.

The worker starts the tuner, which chooses the next trial, and a supervisor for each running trial. It handles signals
and stop requests for all trials, records how long the allocation was held, and at the end requeues its array task if
needed. The process has one thread, and blocks the signals that it waits for. Its children are killed when it dies.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import LaunchSpec, read_launch
from hpcaccel.core.log import Mask, set_log_file, set_mask
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.core.records import Decision, Reason, WorkerStart
from hpcaccel.core.stop_requests import StopRequest, mark_honoured, open_requests
from hpcaccel.core.sweep_dir import SweepDir, WorkerDir
from hpcaccel.node import lease
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation, Slot
from hpcaccel.node.allocation.scheduler_view import KILL_WAIT, PROCTRACK, WORKER_JOB, SchedulerView, write_shared_status
from hpcaccel.node.allocation.slurm_allocation import unchained_allocation
from hpcaccel.node.batch import WATCHED, killed_by, take_over_signals
from hpcaccel.node.failures.disk_space import if_possible
from hpcaccel.node.preparation import clean_stage
from hpcaccel.node.sweep.reclaimed_allocation import ReclaimedAllocation, Stop
from hpcaccel.node.sweep.trial_process import Spare, Trial
from hpcaccel.node.sweep.trial_supervisor import CHECKED, END_TIME
from hpcaccel.node.sweep.tuner_process import TUNER_SIGNAL, TunerProcess
from hpcaccel.node.sweep.worker_account import WorkerAccount

__all__ = ["SweepWorker", "work"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval of the main loop while no signal arrives."""
LEAVE_SECONDS, HURRY_SECONDS = 20.0, 4.0
"""How long the tuner may take to record the last events: usually, and if Slurm will soon kill the job."""
_EXIT_CODES: dict[Reason, int] = {"completed": 0, "cancelled": 130}
"""Exit codes by the reason for the stop. For other reasons the decision determines the exit code."""
_TAKEN = ("preempted", "time_limit", "lost", "cancelled")
"""Reasons for a trial's end that concern the whole allocation."""


def work(sweep: SweepDir, index: int) -> int:
    """Run worker ``index`` of a sweep until nothing is left to do in this allocation. Returns the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*WATCHED, TUNER_SIGNAL})
    take_over_signals()
    worker = sweep.worker(index)
    killed = killed_by()
    worker.prepare()
    launch = read_launch(worker)
    allocation = unchained_allocation(worker, launch)
    lease.acquire(worker, job_id=allocation.job_id, restart_count=allocation.restart_count, trusted=True)
    try:
        return SweepWorker(worker, launch, allocation, killed=killed).run()
    finally:
        lease.release(worker)


class SweepWorker:
    """One worker in one allocation, with its tuner and its running trials.

    Args:
        killed: the signal that killed the previous worker process of the same batch step; empty if there was none.
    """

    def __init__(self, worker: WorkerDir, launch: LaunchSpec, allocation: Allocation, *, killed: str = "") -> None:
        document = read_json(worker.spec) or {}
        self.worker = worker
        self.launch = launch
        self.allocation = allocation
        self.scheduler = SchedulerView(allocation)
        self._shared = 0.0
        """Time of the query whose status was last shared with the trials' supervisors."""
        self.reclaimed = ReclaimedAllocation(self.scheduler, launch)
        self.account = WorkerAccount(worker)
        self.pack = int(document["sweep"].get("pack") or 1)
        self.trials: dict[int, Trial] = {}
        """Running trials by slot number."""
        self.spare = Spare(worker.node_program)
        self.stop: Stop | None = None
        """Why no more trials may start; None while trials may start."""
        self.checked = False
        """Whether a trial has ended well in this allocation, so that later trials need no preflight."""
        self.avoid: set[str] = set()
        """Nodes that a trial has excluded."""
        command = [*document["chooser"], str(worker.sweep.path), str(worker.index)]
        self.tuner = TunerProcess(command, log=worker.host_log, hello=self._greeting)
        self._start: WorkerStart | None = None
        self._killed = killed
        set_mask(Mask.of(worker))
        set_log_file(worker.host_log)

    # -- main loop ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        self.scheduler.query()
        self._share_status()
        allocated_at = self.scheduler.allocated_at
        self._start = self.account.start(self.allocation, allocated_at=allocated_at, local=self.launch.local)
        if self._killed:
            log.warning(f"the previous process of this worker was killed by signal {self._killed}")
        job = f"start {self._start.restart_count} of job {self._start.job_id}"
        log.info(f"worker {self.worker.index}, {job} on {', '.join(self._start.nodes)}")
        self._handle_requests()
        while not self._is_done():
            received = signal.sigtimedwait({*WATCHED, TUNER_SIGNAL}, LOOK_SECONDS)
            self._check_scheduler(received.si_signo if received else None)
            self._handle_requests()
            self._collect_ends()
            if self.scheduler.over_since is not None and not self.launch.local:
                self.account.taken(self.scheduler.over_since)
            self._share_status()
            self._handle_tuner()
            self.spare.keep(wanted=self.stop is None)
            self.account.sign()
        return self._leave()

    def _is_done(self) -> bool:
        return not self.trials and (self.stop is not None or self.tuner.gone or self.tuner.end is not None)

    def _greeting(self) -> list[dict[str, Any]]:
        assert self._start is not None
        hello = {
            "event": "hello",
            "worker": self.worker.index,
            "job_id": self.allocation.job_id,
            "restart_count": self.allocation.restart_count,
            "end_time": self.scheduler.end_time,
            "slots": self.pack,
            "gpus": self._start.gpus,
            "running": {str(place): trial.number for place, trial in self.trials.items()},
        }
        return [hello] if self.stop is None else [hello, self._stopping(self.stop)]

    def _share_status(self) -> None:
        """Share the last status with the trials' supervisors, so that they need not query."""
        status, at = self.scheduler.last_status, self.scheduler.queried_at
        if not self.launch.local and status is not None and at != self._shared:
            self._shared = at
            if_possible(lambda: write_shared_status(self.worker.job_status, status, queried_at=at))

    # -- tuner --------------------------------------------------------------------------------------------------

    def _handle_tuner(self) -> None:
        for message in self.tuner.read():
            if "run" in message:
                self._start_trial(int(message["run"]), int(message.get("slot", 0)))
            elif message.get("end"):
                log.info(f"no more trials for this worker: {message.get('why', '')}")
        if self.tuner.gone and self.trials and self.stop is None:  # other workers will continue the trials
            self._stop(self._end_of_tuner(), request=_to_be_continued("stop"))

    def _start_trial(self, number: int, place: int) -> None:
        if self.stop is not None:
            return  # the tuner has been informed of the stop
        if any(trial.number == number for trial in self.trials.values()):
            return  # a restarted tuner has sent this trial again
        if place in self.trials or not 0 <= place < self.pack:
            self.tuner.kill(
                f"the tuner sent trial {number} to slot {place}, which is in use or invalid (slots: {self.pack})"
            )
            return
        run, slot = self.worker.sweep.trial(number), Slot(number=place, of=self.pack)
        self.trials[place] = Trial(run, number, slot, self.spare, variables=self._variables(slot))
        log.info(f"starting trial {number} in slot {place}")
        self.account.started(number, trials=[one.number for one in self.trials.values()])

    def _variables(self, slot: Slot) -> dict[str, str]:
        variables = slot.environment(os.environ, local=self.launch.local)
        if self.launch.local and self.scheduler.end_time is not None:
            variables[END_TIME] = repr(self.scheduler.end_time)  # locally no scheduler enforces the limit
        if not self.launch.local:
            variables[WORKER_JOB] = str(self.worker.job_status)
            variables[KILL_WAIT] = str(self.allocation.kill_wait_seconds or "")
            variables[PROCTRACK] = self.allocation.proctrack
        return variables | ({CHECKED: "1"} if self.checked else {})

    def _collect_ends(self) -> None:
        for place, trial in list(self.trials.items()):
            if (end := trial.poll()) is None:
                continue
            del self.trials[place]
            self.account.ended(trial.number, end, trials=[one.number for one in self.trials.values()])
            detail = f" ({end['detail']})" if end["detail"] else ""
            log.info(f"trial {trial.number} ended: {end['reason']}{detail}; decision: {end['decision']}")
            bad = end.pop("nodes_excluded", [])
            self.checked |= end["reason"] in ("completed", "pruned")
            self.tuner.send(end)
            if end["decision"] == "requeue":
                self._check_allocation(end, bad)

    def _check_allocation(self, end: dict[str, Any], bad: list[str]) -> None:
        """Stop the worker if a trial's end shows that the allocation is being terminated or is unusable."""
        self.avoid.update(bad)
        if bad or end["error_class"] == "launch":
            # Slurm cannot start ranks on these nodes, or they are excluded: this affects the other trials too.
            self._stop(Stop(reason="failed", then="requeue", detail=end["detail"]), request=_to_be_continued("stop"))
        elif end["reason"] in _TAKEN and self.stop is None:
            wish = self.reclaimed.query()
            if wish is None and end["reason"] == "lost":
                return  # only the trial's supervisor was killed
            stop, number = wish or (Stop(reason=end["reason"], then="requeue"), signal.SIGUSR2)
            self._stop(stop, number=number)

    # -- stopping -------------------------------------------------------------------------------------------------

    def _check_scheduler(self, number: int | None) -> None:
        if (wish := self.reclaimed.check(number, idle=not self.trials)) is not None:
            self._stop(wish[0], number=wish[1])

    def _handle_requests(self) -> None:
        """Handle requests to this worker and to the sweep. Requests to the sweep are not marked as honoured, because
        they also apply to pending workers, until the sweep is resumed."""
        for name, request in open_requests(self.worker):
            mark_honoured(self.worker, name)
            self._stop_on_request(request)
        for _, request in open_requests(self.worker.sweep):
            self._stop_on_request(request)

    def _stop_on_request(self, request: StopRequest) -> None:
        decisions: dict[str, Decision] = {"requeue": "requeue", "pause": "pause"}
        stop = Stop(reason=request.reason, then=decisions.get(request.then, "end"), detail="requested by a user")
        self._stop(stop, request=None if request.then == "finish" else request)  # finish: running trials continue

    def _stop(self, stop: Stop, *, number: signal.Signals | None = None, request: StopRequest | None = None) -> None:
        """Start no more trials. The running trials continue unless ``number`` or ``request`` stops them.

        Args:
            number: signal to forward to the trials' supervisors, which query the scheduler for the signal's meaning.
            request: stop request for the running trials, if the stop does not come from the scheduler.
        """
        if stop.outdoes(self.stop):
            log.info(f"starting no more trials: {stop}")
            self.stop = stop
            self.tuner.send(self._stopping(stop))
        elif stop.by_scheduler and self.stop is not None and self.stop.then == "requeue":
            self.stop = stop  # the scheduler requeues the worker, so the worker must not do so itself
        for trial in self.trials.values():
            if number is not None:
                trial.signal(number)
            if request is not None:
                trial.request_stop(request)

    @staticmethod
    def _stopping(stop: Stop) -> dict[str, Any]:
        return {"event": "stopping", "reason": stop.reason, "then": stop.then}

    # -- end ------------------------------------------------------------------------------------------------------

    def _leave(self) -> int:
        self.spare.close()
        ends = self.stop is not None and (self.stop.by_scheduler or self.stop.then == "end")
        taken = ends or self.scheduler.over_since is not None  # the requeue must be over before Slurm's SIGKILL
        self.tuner.dismiss(HURRY_SECONDS if taken else LEAVE_SECONDS)
        self._handle_requests()
        stop = self.stop or self._end_of_tuner()
        if self.scheduler.over_since is None and (problem := clean_stage(self.worker, self.launch)):
            log.warning(problem)
        if stop.then != "requeue":
            return self._end(stop, code=_EXIT_CODES.get(stop.reason, EXIT_CONTINUED if stop.then == "pause" else 1))
        if not self.launch.resilience.requeue:
            detail = "resilience.requeue is off: another worker, or `hpcaccel sweep resume`, continues the trials"
            return self._end(Stop(reason=stop.reason, then="end", detail=detail), code=EXIT_CONTINUED)
        self._end(stop, code=EXIT_CONTINUED)
        if not stop.by_scheduler:
            self._requeue(stop)
        return EXIT_CONTINUED

    def _end(self, stop: Stop, *, code: int) -> int:
        self.account.end(stop.reason, stop.then, stop.detail)
        log.info(f"worker {self.worker.index} ends: {stop}")
        return code

    def _end_of_tuner(self) -> Stop:
        last = self.tuner.end
        if last is None:
            return Stop(reason="failed", then="end", detail=self.tuner.failed)
        then: Decision = "requeue" if last.get("then") == "requeue" else "end"
        return Stop(reason="completed", then=then, detail=str(last.get("why", "")))

    def _requeue(self, stop: Stop) -> None:
        if self.avoid:
            self.allocation.avoid(sorted(self.avoid), instead_of=())
        else:
            # Nothing is left to do after the requeue, so SIGTERM may end this process at once, even that of a cancel.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM} if not self.launch.local else ())
        if problem := self.allocation.requeue():
            reason: Reason = "cancelled" if problem == TAKEN_DOWN else stop.reason
            self._end(Stop(reason=reason, then="end", detail=f"not requeued: {problem}"), code=EXIT_CONTINUED)


def _to_be_continued(reason: Reason) -> StopRequest:
    return StopRequest(reason=reason, then="requeue", time=time.time())
