"""How an attempt's ranks come to be asked to stop: by a signal, by a user's request, or by the clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcaccel.core.records import Reason, StopRequest, pruned, to_dict
from hpcaccel.core.run_dir import RunDir, write_json
from hpcaccel.node.allocation import Allocation, LocalAllocation, Situation
from hpcaccel.node.control_requests import honour, pending_requests, ranks_ask
from hpcaccel.node.deadline import (
    LEAVE_BEFORE_END_SECONDS,
    Pace,
    forecast,
    lead_seconds,
    patience_seconds,
    read_pace,
    warnings,
)
from hpcaccel.node.launch_spec import Launch
from hpcaccel.node.launchers.start_ranks import Ranks
from hpcaccel.node.retry_io import if_possible

__all__ = ["Inquiry", "Stopping", "Told"]

ASK_SCHEDULER_SECONDS = 60.0
ASK_SELDOM_SECONDS = 300.0
"""Nobody tells a job that its limit was shortened, so it asks: seldom while its end is far, since all tasks of an array
do so. What is shortened to less than this needs Slurm's own warning."""
LOOK_AT_PACE_SECONDS = 15.0
EARLY_SECONDS = 90
"""Slurm may send its warning up to 60 seconds early; a warning that comes earlier than this speaks of an old limit."""
KILL_AGAIN_SECONDS = 10.0
PRUNED_SECONDS = 60.0
"""How long a pruned trial may take to leave, at most: nothing of it is to be saved, and others wait for its nodes."""
LAST_WORDS_SECONDS = 5.0
"""To write down how an attempt ended, before the scheduler kills the batch step too. Of a short time a third."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """An answer of the scheduler's that another process has got."""

    situation: Situation
    asked: float
    """Seconds since the epoch."""


class Inquiry:
    """What was asked of the scheduler in this allocation. Times are seconds since the epoch."""

    def __init__(self, allocation: Allocation, *, told: Callable[[], Told | None] = lambda: None) -> None:
        """
        Args:
            told: what another process of this allocation has asked lately.
        """
        self.allocation = allocation
        self._told = told
        self.began = time.time()
        self.asked = 0.0
        """When the scheduler was asked last."""
        self.answer: Situation | None = None
        """What it said then."""
        self.end_time: float | None = None
        self.granted: float | None = None
        """The end time as it was when this job started, to tell an extended limit from a signal sent by hand."""
        self.queued_at: float | None = None
        self.allocated_at: float | None = None
        self.over_since: float | None = None
        """When the scheduler has begun to take the allocation down: what still runs in it is no longer counted."""

    def ask(self, *, patient: bool = True) -> Situation:
        """See ``Allocation.situation``."""
        before = time.time()
        situation = self.allocation.situation(patient=patient)
        self._take(situation, before=before, asked=time.time())
        return situation

    def look(self, *, patient: bool = True) -> None:
        """As ``ask``, where an answer of the last minutes does: for times, not for what has just happened."""
        if (told := self._told()) is None:
            self.ask(patient=patient)
        elif told.asked > self.asked:
            self._take(told.situation, before=told.asked, asked=told.asked)

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask again, since nobody tells a job of a changed limit."""
        now = time.time()
        left = 0.0 if self.end_time is None else self.end_time - now
        return now - self.asked > min(ASK_SELDOM_SECONDS, max(ASK_SCHEDULER_SECONDS, left / 10))

    def _take(self, situation: Situation, *, before: float, asked: float) -> None:
        self.asked, self.answer = asked, situation
        if situation.known and not situation.running and self.over_since is None:
            self.over_since = before
        if situation.known and situation.running:
            self.end_time = situation.end_time
            self.queued_at, self.allocated_at = situation.submit_time, situation.start_time
            self.granted = self.granted or situation.end_time


class Stopping:
    """One attempt's: hears who wants the ranks to stop, asks them, and kills those that do not leave in time.

    Args:
        say: tells the log.
    """

    def __init__(
        self, run: RunDir, launch: Launch, inquiry: Inquiry, *, attempt: int, say: Callable[[str], None]
    ) -> None:
        self.request: StopRequest | None = None
        """What the ranks were asked last."""
        self.cancel_asked = False
        """Whether the job is to end for good, by a user's wish."""
        self._run = run
        self._launch = launch
        self._inquiry = inquiry
        self._attempt = attempt
        self._say = say
        self._kill_at: float | None = None
        self._killed_at: float | None = None
        """When what is left of the job, which the scheduler has begun to take down, is killed."""
        self._pace: Pace | None = None
        self._looked_at_pace = 0.0

    @property
    def patient(self) -> bool:
        """Whether the ranks may go on as long as they like."""
        return self._kill_at is None

    def hear(self, ranks: Ranks, number: int | None) -> None:
        """Whatever has come since the last call: the signal ``number`` if any, requests, the time."""
        if number == signal.SIGUSR2:
            self.hear_warning(ranks)
        elif number in (signal.SIGTERM, signal.SIGINT):
            self.hear_end(ranks)
        self.hear_users(ranks)
        self.watch_clock(ranks)

    def hear_warning(self, ranks: Ranks) -> None:
        """SIGUSR2: the end of the time is near, or a preemption with grace time has begun."""
        inquiry = self._inquiry
        if inquiry.ask().preempted:
            self._ask(ranks, "preempted")
            return
        limit = self._launch.resilience.warning_seconds + EARLY_SECONDS
        if inquiry.end_time is None or inquiry.end_time - time.time() <= limit:
            self._ask(ranks, "time_limit")
        elif inquiry.granted is not None and inquiry.end_time > inquiry.granted + 1:
            self._say("a warning came, but the time limit was extended: going on")
        else:
            self._ask(ranks, "stop")  # somebody's own `scancel --batch --signal=USR2`

    def hear_end(self, ranks: Ranks) -> None:
        """SIGTERM to the batch step: a preemption without grace, a cancel, or somebody's own `kill`."""
        heard = time.time()
        allocation = self._inquiry.allocation
        if isinstance(allocation, LocalAllocation):
            allocation.cancelled()
        situation = self._inquiry.ask()
        if not situation.running and situation.known and allocation.kill_wait_seconds is not None:
            self._killed_at = heard + _seconds_left(situation, allocation.kill_wait_seconds)
        if situation.running or not situation.known:
            self._ask(ranks, "preempted" if situation.preempted else "stop")
        elif situation.comes_back or situation.taken_for:
            self._ask(ranks, situation.taken_for or "preempted")
        else:
            self.cancel_asked = True
            self._ask(ranks, "cancelled", then="cancel")
        if self._killed_at is not None and (situation.requeueable or not situation.comes_back):
            # Whatever an earlier request has given the ranks. Where the job comes back by itself, its next start writes
            # the end.
            at = time.monotonic() + max(0.0, self._killed_at - time.time())
            self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def hear_users(self, ranks: Ranks) -> None:
        """Requests in the run directory, the users' and the ranks' own."""
        if self.request is None and ranks_ask(self._run, self._attempt):
            # In a preemption with grace time Slurm signals the ranks alone.
            situation = self._inquiry.ask(patient=False)
            self._ask(ranks, "preempted" if situation.preempted else "stop")
        for name, request in pending_requests(self._run):
            honour(self._run, name)
            if request.then == "cancel":
                self.cancel_asked = True
            self._ask(ranks, request.reason, then=request.then)

    def hear_the_last(self) -> None:
        """A cancel that came while the ranks were leaving by themselves."""
        for name, request in pending_requests(self._run):
            if request.then == "cancel":
                honour(self._run, name)
                self.cancel_asked = True
        allocation = self._inquiry.allocation
        if isinstance(allocation, LocalAllocation) and signal.SIGTERM in signal.sigpending():
            allocation.cancelled()

    def watch_clock(self, ranks: Ranks) -> None:
        """Ask the ranks when the time comes, kill them when they have had theirs."""
        now, inquiry = time.time(), self._inquiry
        if isinstance(inquiry.allocation, LocalAllocation):
            inquiry.ask()
        elif inquiry.is_due:
            inquiry.look(patient=False)  # signals and requests wait meanwhile
        late = self._lead()
        if self.request is None and inquiry.end_time is not None and now > inquiry.end_time - late:
            # Slurm tells nobody that it has extended a limit.
            inquiry.ask(patient=False)
            if now > inquiry.end_time - late:
                self._ask(ranks, "time_limit")
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._say("the ranks did not leave in time: killing them")
            self.kill(ranks)

    def kill(self, ranks: Ranks) -> None:
        """Kill the ranks, and those again that are still there after a while."""
        ranks.kill()
        # Of a job that is being taken down srun waits for its step longer than there is time.
        self._kill_at = time.monotonic() + (0.0 if self._killed_at else KILL_AGAIN_SECONDS)

    def _ask(self, ranks: Ranks, reason: Reason, *, then: str = "requeue") -> None:
        """Ask the ranks to stop: the reason first, then the signal."""
        if self.request is not None and self.request.then == then:
            return
        self._look_at_pace()
        patience = self._patience(reason, then)
        if pruned(self.request):
            if self._kill_at is not None:  # somebody wants the nodes besides: no other end, only a sooner one
                self._kill_at = min(self._kill_at, time.monotonic() + patience)
            return
        request = StopRequest(
            reason=reason,
            then=then,  # type: ignore[arg-type]
            time=time.time(),
            deadline=self._killed_at or (None if self._left(reason) is None else time.time() + patience),
        )
        self.request = request
        # Without it the ranks take the signal for the cluster's, and are continued: right for all but a user's wish.
        if_possible(lambda: write_json(self._run.stop(self._attempt), to_dict(request)), say=self._say)
        self._say(f"asking the ranks to stop: {reason} ({then}){forecast(self._pace, request)}")
        # Code behind the loop may take its time, unless nobody waits for what it makes.
        if self._kill_at is None and (then != "finish" or reason == "pruned"):
            self._kill_at = time.monotonic() + patience
        ranks.ask()

    def _lead(self) -> float:
        """How long before the end the ranks are asked to stop, in seconds."""
        now, end_time, resilience = time.time(), self._inquiry.end_time, self._launch.resilience
        left = (end_time or now) - now
        if end_time is not None and now - self._looked_at_pace > min(LOOK_AT_PACE_SECONDS, left / 10):
            before = self._pace
            self._look_at_pace()
            if before is None and self._pace is not None:
                for line in warnings(self._pace, resilience, self._inquiry.allocation.kill_wait_seconds):
                    self._say(line)
        # Slurm's own warning comes before this; it is for a warning that got lost, and for the local backend.
        warning = resilience.warning_seconds * (1.0 if self._launch.local else 0.5)
        limit = (end_time or now) - self._inquiry.began
        return lead_seconds(self._pace, warning_seconds=warning, limit_seconds=limit)

    def _look_at_pace(self) -> None:
        self._looked_at_pace = time.time()
        self._pace = read_pace(self._run, self._attempt) or self._pace

    def _left(self, reason: Reason) -> float | None:
        """Until the processes are killed, in seconds, where the scheduler will do that."""
        if reason not in ("time_limit", "preempted") or self._inquiry.end_time is None:
            return None
        return self._inquiry.end_time - time.time()

    def _patience(self, reason: Reason, then: str) -> float:
        """How long the ranks may take to leave, in seconds."""
        timeout = float(self._launch.resilience.stop_timeout_seconds)
        if reason == "pruned" and then == "finish":
            return min(timeout, PRUNED_SECONDS)
        left = None if self._killed_at else self._left(reason)  # then the scheduler, or ``hear_end``, sees to it
        return patience_seconds(self._pace, stop_timeout_seconds=timeout, left_seconds=left)


def _seconds_left(situation: Situation, kill_wait_seconds: float) -> float:
    """How long the ranks have, of the time until the scheduler kills everything."""
    if situation.requeueable:  # a trial comes back in any case, but its worker has to be requeued
        return kill_wait_seconds - min(LEAVE_BEFORE_END_SECONDS, kill_wait_seconds / 4)
    if situation.comes_back:
        return kill_wait_seconds
    return kill_wait_seconds - min(LAST_WORDS_SECONDS, kill_wait_seconds / 3)
