"""The host: the batch step of a sweep's worker, which runs trial after trial in one allocation.

It starts the chooser, which says what comes next, and a supervisor for each trial in flight; it hears the scheduler for
all of them, keeps the worker's account, and in the end requeues the worker's task of the array, once. Like a supervisor
it is one thread that blocks the signals that matter and waits for them. Its children die with it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from hpcaccel.core.records import EXIT_CONTINUED, Decision, Reason, StopRequest, WorkerStart
from hpcaccel.core.run_dir import SweepDir, WorkerDir, read_json, read_lines
from hpcaccel.core.secret_masking import Mask
from hpcaccel.node import lease
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation, LocalAllocation, SlurmAllocation
from hpcaccel.node.batch import killed_by
from hpcaccel.node.control_requests import honour, pending_requests
from hpcaccel.node.launch_spec import Launch, read_launch
from hpcaccel.node.launchers.provision import clean_stage
from hpcaccel.node.retry_io import if_possible
from hpcaccel.node.stop_sequence import Inquiry
from hpcaccel.node.supervisor import WATCHED, take_over_signals
from hpcaccel.node.sweep.reclaimed_allocation import Recall, Stop
from hpcaccel.node.sweep.shared_job_status import KILL_WAIT, WORKER_JOB, write_answer
from hpcaccel.node.sweep.slots import Slot
from hpcaccel.node.sweep.trial_process import Spare, Trial
from hpcaccel.node.sweep.trial_supervisor import CHECKED, END_TIME
from hpcaccel.node.sweep.tuner_process import SPOKEN, Chooser
from hpcaccel.node.sweep.usage import WorkerAccount

__all__ = ["Host", "record_killed", "record_setup_failure", "work"]

LOOK_SECONDS = 1.0
LEAVE_SECONDS, HURRY_SECONDS = 20.0, 4.0
"""How long the chooser may take to write down what it has heard; where Slurm kills soon, less."""
_NOT_AGAIN = "a worker that ends in this way twice in a row is not requeued"
_EXIT_CODES: dict[Reason, int] = {"completed": 0, "cancelled": 130}
_TAKEN = ("preempted", "time_limit", "lost", "cancelled")
"""Reasons for which a trial is to be continued, that concern the whole allocation."""


def work(sweep: SweepDir, index: int) -> int:
    """Be worker ``index`` of a sweep until nothing is left to do in this allocation; the batch step's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*WATCHED, SPOKEN})
    take_over_signals()
    worker = sweep.worker(index)
    killed = killed_by()
    worker.prepare()
    launch = read_launch(worker)
    allocation: Allocation = LocalAllocation(worker, launch) if launch.local else SlurmAllocation()
    lease.acquire(worker, job_id=allocation.job_id, restart_count=allocation.restart_count, trusted=True)
    try:
        return Host(worker, launch, allocation, killed=killed).run()
    finally:
        lease.release(worker)


def record_setup_failure(worker: WorkerDir, *, exit_code: int, name: str) -> int:
    """Write down that this worker came to nothing, because a line of the set-up failed."""
    worker.prepare()
    launch = read_launch(worker)
    allocation: Allocation = LocalAllocation(worker, launch) if launch.local else SlurmAllocation()
    account = WorkerAccount(worker)
    account.start(allocation, allocated_at=allocation.situation().start_time, local=launch.local)
    detail = f"{name} failed with code {exit_code}; see {worker.slurm_log}"
    account.end("failed", "end", detail)
    print(f"hpcaccel: {detail}", flush=True)
    return 1


def record_killed(worker: WorkerDir, why: str) -> int:
    """Write down that no host stays alive here, and try again elsewhere, once; the batch step's exit code."""
    killed_by()  # said here; the next start's first host follows no killed one
    worker.prepare()
    launch = read_launch(worker)
    allocation: Allocation = LocalAllocation(worker, launch) if launch.local else SlurmAllocation()
    ends = [line for line, _ in read_lines(worker.account) if line.get("event") == "end"]
    again = launch.resilience.requeue and not (ends and ends[-1].get("detail", "").endswith(_NOT_AGAIN))
    account = WorkerAccount(worker)
    detail = f"{why}; {_NOT_AGAIN}"
    account.end("failed", "requeue" if again else "end", detail)
    print(f"hpcaccel: {detail}", flush=True)
    if again and (problem := allocation.requeue()):
        account.end("cancelled" if problem == TAKEN_DOWN else "failed", "end", f"not requeued: {problem}")
    return 1


class Host:
    """
    Args:
        killed: the signal that ended the host before this one in the same batch step, if there was one.
    """

    def __init__(self, worker: WorkerDir, launch: Launch, allocation: Allocation, *, killed: str = "") -> None:
        document = read_json(worker.spec) or {}
        self.worker = worker
        self.launch = launch
        self.allocation = allocation
        self.inquiry = Inquiry(allocation)
        self._shared = 0.0
        """When the scheduler gave the answer that the trials' supervisors know."""
        self.recall = Recall(self.inquiry, launch, say=self._say)
        self.account = WorkerAccount(worker)
        self.pack = int(document["sweep"].get("pack") or 1)
        self.trials: dict[int, Trial] = {}
        """Those in flight, by place."""
        self.spare = Spare(worker.node_program)
        self.stop: Stop | None = None
        """Set once no trial may start any more."""
        self.checked = False
        """Whether a trial has come to a good end here."""
        self.avoid: set[str] = set()
        """Nodes that a trial's supervisor holds to be bad."""
        command = [*document["chooser"], str(worker.sweep.path), str(worker.index)]
        self.chooser = Chooser(command, log=worker.host_log, hello=self._hello, say=self._say)
        self._start: WorkerStart | None = None
        self._killed = killed
        self._mask = Mask.of(worker)

    # -- the whole ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        self.inquiry.ask()
        self._share_answer()
        allocated_at = self.inquiry.allocated_at
        self._start = self.account.start(self.allocation, allocated_at=allocated_at, local=self.launch.local)
        where = ", ".join(self._start.nodes)
        if self._killed:
            self._say(f"the host of this worker was killed by signal {self._killed}; this is another one")
        self._say(
            f"worker {self.worker.index}, start {self._start.restart_count} of job {self._start.job_id} on {where}"
        )
        self._hear_users()
        while not self._is_done():
            received = signal.sigtimedwait({*WATCHED, SPOKEN}, LOOK_SECONDS)
            self._hear_scheduler(received.si_signo if received else None)
            self._hear_users()
            self._see_ends()
            if self.inquiry.over_since is not None and not self.launch.local:
                self.account.taken(self.inquiry.over_since)
            self._share_answer()
            self._hear_chooser()
            self.spare.keep(wanted=self.stop is None)
            self.account.sign()
        return self._leave()

    def _is_done(self) -> bool:
        return not self.trials and (self.stop is not None or self.chooser.gone or self.chooser.end is not None)

    def _hello(self) -> list[dict[str, Any]]:
        assert self._start is not None
        hello = {
            "event": "hello",
            "worker": self.worker.index,
            "job_id": self.allocation.job_id,
            "restart_count": self.allocation.restart_count,
            "end_time": self.inquiry.end_time,
            "slots": self.pack,
            "gpus": self._start.gpus,
            "running": {str(place): trial.number for place, trial in self.trials.items()},
        }
        return [hello] if self.stop is None else [hello, self._stopping(self.stop)]

    def _share_answer(self) -> None:
        """Let the supervisors of trials know what the scheduler said last, so that they need not ask."""
        inquiry = self.inquiry
        if self.launch.local or inquiry.answer is None or inquiry.asked == self._shared:
            return
        self._shared = inquiry.asked
        answer = inquiry.answer
        if_possible(lambda: write_answer(self.worker.job_answer, answer, asked=inquiry.asked), say=self._say)

    # -- the chooser ----------------------------------------------------------------------------------------------

    def _hear_chooser(self) -> None:
        for message in self.chooser.hear():
            if "run" in message:
                self._start_trial(int(message["run"]), int(message.get("slot", 0)))
            elif message.get("end"):
                self._say(f"the chooser: nothing more to do here: {message.get('why', '')}")
        if self.chooser.gone and self.trials and self.stop is None:
            # Nobody follows them any more. They go on elsewhere.
            self._stop(self._end_of_chooser(), request=_to_be_continued("stop"))

    def _start_trial(self, number: int, place: int) -> None:
        if self.stop is not None:
            return  # it knows by now
        if any(trial.number == number for trial in self.trials.values()):
            return  # said by a chooser that is new here
        if place in self.trials or not 0 <= place < self.pack:
            self.chooser.kill(f"trial {number} is to run in place {place}, which is taken or none of the {self.pack}")
            return
        run, slot = self.worker.sweep.trial(number), Slot(number=place, of=self.pack)
        self.trials[place] = Trial(run, number, slot, self.spare, variables=self._variables(slot), say=self._say)
        self._say(f"trial {number} starts in place {place}")
        self.account.trial(number, "started", trials=self._numbers())

    def _variables(self, slot: Slot) -> dict[str, str]:
        variables = slot.environment(os.environ, local=self.launch.local)
        if self.launch.local and self.inquiry.end_time is not None:
            variables[END_TIME] = repr(self.inquiry.end_time)  # nobody else keeps it
        if not self.launch.local:
            variables[WORKER_JOB] = str(self.worker.job_answer)
            variables[KILL_WAIT] = str(self.allocation.kill_wait_seconds or "")
        if self.checked:
            variables[CHECKED] = "1"
        return variables

    def _see_ends(self) -> None:
        for place, trial in list(self.trials.items()):
            if (end := trial.poll()) is None:
                continue
            del self.trials[place]
            self.account.trial(trial.number, "ended", trials=self._numbers())
            self._say(
                f"trial {trial.number} ended, {end['reason']}; then: {end['decision']} {end['detail'] or ''}".rstrip()
            )
            bad = end.pop("nodes_excluded", [])
            self.checked |= end["reason"] in ("completed", "pruned")
            self.chooser.tell(end)
            if end["decision"] == "requeue":
                self._look_behind(end, bad)

    def _look_behind(self, end: dict[str, Any], bad: list[str]) -> None:
        """Whether a trial that is to be continued says something about the allocation."""
        self.avoid.update(bad)
        if bad or end["error_class"] == "launch":
            # Slurm cannot start ranks here, or should not: for the others that is no better.
            self._stop(Stop(reason="failed", then="requeue", detail=end["detail"]), request=_to_be_continued("stop"))
        elif end["reason"] in _TAKEN and self.stop is None:
            wish = self.recall.look()
            if wish is None and end["reason"] == "lost":
                return  # its supervisor alone was killed
            stop, number = wish or (Stop(reason=end["reason"], then="requeue"), signal.SIGUSR2)
            self._stop(stop, number=number)

    def _numbers(self) -> list[int]:
        return [trial.number for trial in self.trials.values()]

    # -- being stopped --------------------------------------------------------------------------------------------

    def _hear_scheduler(self, number: int | None) -> None:
        if (wish := self.recall.heard(number, idle=not self.trials)) is not None:
            stop, signal_of_it = wish
            self._stop(stop, number=signal_of_it)

    def _hear_users(self) -> None:
        """Requests to this worker, and to the whole sweep. The latter stay until it is resumed: a worker that waits in
        the queue finds them too."""
        for name, request in pending_requests(self.worker):
            honour(self.worker, name)
            self._obey(request)
        for _, request in pending_requests(self.worker.sweep):
            self._obey(request)

    def _obey(self, request: StopRequest) -> None:
        decisions: dict[str, Decision] = {"requeue": "requeue", "pause": "pause"}
        stop = Stop(reason=request.reason, then=decisions.get(request.then, "end"), detail="by a user's wish")
        self._stop(stop, request=None if request.then == "finish" else request)  # finish: what runs may run to its end

    def _stop(self, stop: Stop, *, number: signal.Signals | None = None, request: StopRequest | None = None) -> None:
        """Start nothing any more, and have the trials in flight leave.

        Args:
            number: a signal for their supervisors, which ask the scheduler what it means.
            request: what they are asked, where it is not the scheduler's wish.
        """
        if stop.outdoes(self.stop):
            self._say(f"stopping: {stop.reason}, then: {stop.then} {stop.detail}".rstrip())
            self.stop = stop
            self.chooser.tell(self._stopping(stop))
        elif stop.by_scheduler and self.stop is not None and self.stop.then == "requeue":
            self.stop = stop  # it was about to be requeued, and now that happens without us
        for trial in self.trials.values():
            if number is not None:
                trial.signal(number)
            if request is not None:
                trial.ask(request)

    @staticmethod
    def _stopping(stop: Stop) -> dict[str, Any]:
        return {"event": "stopping", "reason": stop.reason, "then": stop.then}

    # -- the end --------------------------------------------------------------------------------------------------

    def _leave(self) -> int:
        self.spare.close()
        ends = self.stop is not None and (self.stop.by_scheduler or self.stop.then == "end")
        taken = ends or self.inquiry.over_since is not None  # to be requeued before Slurm's SIGKILL
        self.chooser.dismiss(HURRY_SECONDS if taken else LEAVE_SECONDS)
        self._hear_users()
        stop = self.stop or self._end_of_chooser()
        if self.inquiry.over_since is None and (problem := clean_stage(self.worker, self.launch)):
            self._say(problem)
        if stop.then != "requeue":
            return self._end(stop, code=_EXIT_CODES.get(stop.reason, EXIT_CONTINUED if stop.then == "pause" else 1))
        if not self.launch.resilience.requeue:
            detail = "resilience.requeue is off: another worker, or `hpcaccel sweep resume`, goes on"
            return self._end(Stop(reason=stop.reason, then="end", detail=detail), code=EXIT_CONTINUED)
        self._end(stop, code=EXIT_CONTINUED)
        if not stop.by_scheduler:
            self._requeue(stop)
        return EXIT_CONTINUED

    def _end(self, stop: Stop, *, code: int) -> int:
        self.account.end(stop.reason, stop.then, stop.detail)
        self._say(f"worker {self.worker.index} ends, {stop.reason}; then: {stop.then} {stop.detail}".rstrip())
        return code

    def _end_of_chooser(self) -> Stop:
        last = self.chooser.end
        if last is None:
            return Stop(reason="failed", then="end", detail=self.chooser.failed)
        then: Decision = "requeue" if last.get("then") == "requeue" else "end"
        return Stop(reason="completed", then=then, detail=str(last.get("why", "")))

    def _requeue(self, stop: Stop) -> None:
        if self.avoid:
            self.allocation.avoid(sorted(self.avoid), instead_of=())
        else:
            # Nothing is left to do behind the requeue: Slurm's SIGTERM may end this process at once, a cancel's too.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM} if not self.launch.local else ())
        if problem := self.allocation.requeue():
            cancelled = problem == TAKEN_DOWN
            reason: Reason = "cancelled" if cancelled else stop.reason
            self._end(Stop(reason=reason, then="end", detail=f"not requeued: {problem}"), code=EXIT_CONTINUED)

    def _say(self, text: str) -> None:
        line = self._mask(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}")
        print(f"hpcaccel: {line}", flush=True)
        try:
            with self.worker.host_log.open("a", encoding="utf-8") as log:
                log.write(line + "\n")
        except OSError as error:
            print(f"hpcaccel: cannot write {self.worker.host_log}: {error.strerror}", flush=True)


def _to_be_continued(reason: Reason) -> StopRequest:
    return StopRequest(reason=reason, then="requeue", time=time.time())
