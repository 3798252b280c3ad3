"""Stopping the ranks of an attempt: on a signal, on a request, or before the time limit.

``StopSequence.update`` is called at each signal and once a second. If the ranks must stop, it

1. writes ``attempts/<n>/stop.json``: the reason, what follows, and when the processes will be killed;
2. signals the ranks, which save a checkpoint and exit;
3. kills ranks that are still running when their time is up.

How early the sequence starts before a time limit depends on the measured duration of steps and saves (``Pace``).
"""

from __future__ import annotations

import logging
import signal
import time

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.records import Reason, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest, has_signal_mark, mark_honoured, open_requests, pruned
from hpcaccel.node.allocation import JobStatus
from hpcaccel.node.allocation.scheduler_view import SchedulerView, signal_meaning
from hpcaccel.node.failures.disk_space import if_possible
from hpcaccel.node.launchers import RankProcesses
from hpcaccel.node.stop_timing import (
    LEAVE_BEFORE_END_SECONDS,
    Pace,
    forecast,
    lead_seconds,
    patience_seconds,
    read_pace,
    warnings,
)

__all__ = ["StopSequence"]

log = logging.getLogger(__name__)

READ_PACE_SECONDS = 15.0
"""Longest interval between two readings of the pace. Close to the time limit the interval is shorter."""
KILL_AGAIN_SECONDS = 10.0
"""Ranks that are still running this long after a kill are killed again."""
PRUNED_SECONDS = 60.0
"""How long a trial may take to exit if it is pruned with ``finish``. Such a trial saves nothing, and other trials need
its nodes."""
WRITE_END_SECONDS = 5.0
"""Time reserved to write the attempt's end line before the scheduler kills the batch step, too. At most a third of
KillWait is reserved."""


class StopSequence:
    """Stops the ranks of one attempt. A repeated request with the same ``then`` is not sent to the ranks again; a
    signal with which the scheduler terminates the job can still bring the kill forward."""

    def __init__(self, run: RunDir, launch: LaunchSpec, scheduler: SchedulerView, *, attempt: int) -> None:
        self.request: StopRequest | None = None
        """The last request to the ranks."""
        self.cancel_requested = False
        """Whether the job or the run was cancelled, so that the run ends for good."""
        self._run = run
        self._launch = launch
        self._scheduler = scheduler
        self._attempt = attempt
        self._kill_at: float | None = None
        """When the ranks will be killed (monotonic clock); None if they have no deadline to exit by."""
        self._killed_at: float | None = None
        """If the scheduler terminates the job: when the ranks must have exited (seconds since the epoch); else None."""
        self._pace: Pace | None = None
        self._pace_read_at = 0.0
        self._was_warned = False
        """Whether Slurm's time limit warning came early, so that ``check_time`` must stop the ranks."""

    @property
    def unlimited(self) -> bool:
        """Whether the ranks have no deadline to exit by."""
        return self._kill_at is None

    def update(self, ranks: RankProcesses, number: int | None) -> None:
        """Handle the signal ``number``, if any, then new requests, then deadlines."""
        if number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            self.handle_signal(ranks, number)
        self.handle_requests(ranks)
        self.check_time(ranks)

    def handle_signal(self, ranks: RankProcesses, number: int) -> None:
        """Stop the ranks if the signal requires it, see ``signal_meaning``."""
        received = time.time()
        scheduler, allocation = self._scheduler, self._scheduler.allocation
        if number != signal.SIGUSR2:
            allocation.terminated()
        status = scheduler.query()
        meaning = signal_meaning(
            number,
            status,
            warning_seconds=self._launch.resilience.warning_seconds,
            end_time=scheduler.end_time,
            was_extended=scheduler.was_extended,
        )
        if meaning is None:
            log.info("received the time limit warning, but the limit has been extended: continuing")
            return
        if meaning.reason == "time_limit" and status.running and (early := self._seconds_until_warning()) > 0:
            log.info(f"received the time limit warning early: stopping the ranks in at most {early:.0f} s")
            self._was_warned = True
            return
        if status.known and not status.running and allocation.kill_wait_seconds is not None:
            self._killed_at = received + _seconds_left(status, allocation.kill_wait_seconds)
        self.cancel_requested |= meaning.is_cancel
        self._stop(ranks, meaning.reason, then="cancel" if meaning.is_cancel else "requeue")
        if self._killed_at is not None and (status.requeueable or not status.will_requeue):
            # This deadline overrides a later one from an earlier request. If the scheduler requeues the job, none is
            # needed, because the job's next start writes the end line of this attempt.
            at = time.monotonic() + max(0.0, self._killed_at - time.time())
            self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def handle_requests(self, ranks: RankProcesses) -> None:
        """Handle the requests to stop in ``control/``, and a signal that only the ranks have received."""
        if self.request is None and has_signal_mark(self._run, self._attempt):
            # In a preemption with grace time Slurm signals the ranks but not the batch step.
            status = self._scheduler.query(patient=False)
            self._stop(ranks, "preempted" if status.preempted else "stop")
        for name, request in open_requests(self._run):
            mark_honoured(self._run, name)
            if request.then == "cancel":
                self.cancel_requested = True
            self._stop(ranks, request.reason, then=request.then)

    def handle_late_cancel(self) -> None:
        """Record a cancel that arrived after the last check for requests."""
        for name, request in open_requests(self._run):
            if request.then == "cancel":
                mark_honoured(self._run, name)
                self.cancel_requested = True
        if signal.SIGTERM in signal.sigpending():
            self._scheduler.allocation.terminated()

    def check_time(self, ranks: RankProcesses) -> None:
        """Stop the ranks if the time limit is near, and kill ranks that take too long to exit."""
        now, scheduler = time.time(), self._scheduler
        if scheduler.is_due:
            scheduler.refresh(patient=False)  # no retries: they would delay signals and requests
        late = self._lead()
        if self.request is None and scheduler.end_time is not None and now > scheduler.end_time - late:
            # Query first: Slurm does not notify a job whose limit was extended.
            status = scheduler.query(patient=False)
            if now > scheduler.end_time - late:
                # The end time of a job that is being preempted is the end of its grace time.
                self._stop(ranks, "preempted" if status.preempted else "time_limit")
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            log.warning("the ranks did not exit in time: killing them")
            self.kill(ranks)

    def kill(self, ranks: RankProcesses) -> None:
        """Kill the ranks, and again later if some are still running."""
        ranks.kill()
        # In a job that is being terminated, srun would wait for its step for too long: kill srun at the next check.
        self._kill_at = time.monotonic() + (0.0 if self._killed_at else KILL_AGAIN_SECONDS)

    def _stop(self, ranks: RankProcesses, reason: Reason, *, then: str = "requeue") -> None:
        """Write the request to stop, then signal the ranks. A request with the same ``then`` as the last one changes
        nothing. After a prune, a further request can only bring the kill forward."""
        if self.request is not None and self.request.then == then:
            return
        self._read_pace()
        patience = self._patience(reason, then)
        if pruned(self.request):
            if self._kill_at is not None:  # a pruned trial ends in any case; this stop only makes it end sooner
                self._kill_at = min(self._kill_at, time.monotonic() + patience)
            return
        request = StopRequest(
            reason=reason,
            then=then,  # type: ignore[arg-type]
            time=time.time(),
            deadline=self._killed_at or (None if self._left(reason) is None else time.time() + patience),
        )
        self.request = request
        # Without the file the ranks would assume that Slurm sent the signal, and the run would continue later, even if
        # a user has stopped it.
        if_possible(lambda: write_json(self._run.stop(self._attempt), to_dict(request)))
        log.info(f"stopping the ranks: {reason} ({then}){forecast(self._pace, request)}")
        # With ``finish``, the code after the loop may take any time, unless a trial is pruned and needs no result.
        if self._kill_at is None and (then != "finish" or reason == "pruned"):
            self._kill_at = time.monotonic() + patience
        ranks.request_stop()

    def _lead(self) -> float:
        """How long before the time limit the ranks are stopped, in seconds."""
        now, end_time, resilience = time.time(), self._scheduler.end_time, self._launch.resilience
        left = (end_time or now) - now
        if end_time is not None and now - self._pace_read_at > min(READ_PACE_SECONDS, left / 10):
            before = self._pace
            self._read_pace()
            if before is None and self._pace is not None:
                for line in warnings(self._pace, resilience, self._scheduler.allocation.kill_wait_seconds):
                    log.warning(line)
        # Slurm's own warning comes earlier. This check is for a lost or early warning and for the local backend.
        warning = resilience.warning_seconds * (1.0 if self._launch.local or self._was_warned else 0.5)
        limit = (end_time or now) - self._scheduler.began
        return lead_seconds(self._pace, warning_seconds=warning, limit_seconds=limit)

    def _read_pace(self) -> None:
        self._pace_read_at = time.time()
        self._pace = read_pace(self._run, self._attempt) or self._pace

    def _seconds_until_warning(self) -> float:
        """Seconds until the warning is due. Slurm may send it up to a minute earlier than asked for (sbatch,
        ``--signal``), which can be most of a short job's time. 0 if the end time is unknown."""
        end_time = self._scheduler.end_time
        return 0.0 if end_time is None else end_time - self._launch.resilience.warning_seconds - time.time()

    def _left(self, reason: Reason) -> float | None:
        """Seconds until the scheduler kills the processes; None if it will not kill them, or if the time is unknown."""
        if reason not in ("time_limit", "preempted") or self._scheduler.end_time is None:
            return None
        return self._scheduler.end_time - time.time()

    def _patience(self, reason: Reason, then: str) -> float:
        """How long the ranks may take to exit, in seconds."""
        timeout = float(self._launch.resilience.stop_timeout_seconds)
        if reason == "pruned" and then == "finish":
            return min(timeout, PRUNED_SECONDS)
        # If the scheduler terminates the job, ``handle_signal`` sets the deadline, or the scheduler kills the ranks.
        left = None if self._killed_at else self._left(reason)
        return patience_seconds(self._pace, stop_timeout_seconds=timeout, left_seconds=left)


def _seconds_left(status: JobStatus, kill_wait_seconds: float) -> float:
    """How many seconds the ranks have to exit. After ``kill_wait_seconds`` the scheduler kills the whole job."""
    if status.requeueable:  # leave time for the requeue: of this job, or of the worker that runs this trial
        return kill_wait_seconds - min(LEAVE_BEFORE_END_SECONDS, kill_wait_seconds / 4)
    if status.will_requeue:
        return kill_wait_seconds
    return kill_wait_seconds - min(WRITE_END_SECONDS, kill_wait_seconds / 3)
