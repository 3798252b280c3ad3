"""The supervisor: starts the ranks, hears the scheduler and the user, writes the ledger, decides what follows.

One thread, no handlers: the signals that matter are blocked and waited for, so nothing ever happens in the middle of
something else.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time

from hpcaccel import layout
from hpcaccel.errors import HpcaccelError
from hpcaccel.node import lease
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation, LocalAllocation, Situation, current_allocation
from hpcaccel.node.causes import cause
from hpcaccel.node.chain import ChainedAllocation
from hpcaccel.node.classify import Failure, classify
from hpcaccel.node.control import cancel_was_asked, honour, pending_requests, ranks_ask
from hpcaccel.node.deadline import Pace, forecast, lead_seconds, patience_seconds, read_pace, warnings
from hpcaccel.node.exclusion import Placement
from hpcaccel.node.hangs import HangWatch
from hpcaccel.node.launch import Launch, read_launch
from hpcaccel.node.launcher import Ranks, run_on_each_node, start_ranks
from hpcaccel.node.ledger import Ledger, last_step, read_outcome, resumed_step
from hpcaccel.node.preflight import preflight
from hpcaccel.node.verdict import Seen, Verdict, judge
from hpcaccel.records import EXIT_CONTINUED, AttemptEnd, AttemptStart, Reason, StopRequest, to_dict
from hpcaccel.rundir import RunDir, read_json, write_json
from hpcaccel.slurm.states import JobState

__all__ = ["Supervisor", "record_setup_failure", "supervise"]

WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCHLD}
LOOK_SECONDS = 1.0
ASK_SCHEDULER_SECONDS = 60.0
"""Nobody tells a job that its limit was shortened. What is shortened to less than this needs Slurm's own warning."""
LOOK_AT_PACE_SECONDS = 15.0
EARLY_SECONDS = 90
"""Slurm may send its warning up to 60 seconds early; a warning that comes earlier than this speaks of an old limit."""
KILL_AGAIN_SECONDS = 10.0


def supervise(run: RunDir) -> int:
    """Run the ranks of ``run`` until nothing is left to do in this allocation; the batch step's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _take_over_signals()
    launch = read_launch(run)
    allocation = current_allocation(run, launch)
    lease.acquire(run, job_id=allocation.job_id, restart_count=allocation.restart_count)
    try:
        if isinstance(allocation, ChainedAllocation) and not allocation.begin():
            return 0
        return Supervisor(run, launch, allocation).run_attempts()
    finally:
        if isinstance(allocation, ChainedAllocation):
            allocation.end()
        lease.release(run)


def _take_over_signals() -> None:
    """Hear what the batch script heard during its set-up. Until here it ignored USR2, which our children must not."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    for name in os.environ.pop("HPCACCEL_EARLY_SIGNALS", "").split():
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


def record_setup_failure(run: RunDir, *, exit_code: int, name: str) -> int:
    """Write the end of an attempt whose ranks never started because a line of the set-up failed."""
    ledger = Ledger.read(run)
    ledger.close_lost(run)
    now = time.time()
    attempt = ledger.next_attempt
    allocation = current_allocation(run, read_launch(run))
    ledger.start(AttemptStart(attempt=attempt, time=now, job_id=allocation.job_id, nodes=allocation.nodes))
    detail = f"{name} failed with code {exit_code}; see {run.slurm_log}"
    ledger.end(
        AttemptEnd(
            attempt=attempt,
            time=now,
            reason="failed",
            decision="end",
            error_class="setup",
            detail=detail,
            advice=cause("setup").advice,
            exit_code=exit_code,
        )
    )
    if isinstance(allocation, ChainedAllocation):
        allocation.end()
    print(f"hpcaccel: {detail}", flush=True)
    return 1


class Supervisor:
    def __init__(self, run: RunDir, launch: Launch, allocation: Allocation) -> None:
        self.run = run
        self.launch = launch
        self.allocation = allocation
        self.ledger = Ledger.read(run)
        self.placement = Placement(run, launch, allocation)
        self.restarts = 0
        self.attempt = 0
        self.end_time: float | None = None
        self._granted: float | None = None
        """The end time as it was when this job started, to tell an extended limit from a signal sent by hand."""
        self._asked_scheduler = 0.0
        self._began = time.time()
        self._queued_at: float | None = None
        self._allocated_at: float | None = None
        self._forget_stop()

    def _forget_stop(self) -> None:
        self.stop: StopRequest | None = None
        self.cancel_asked = False
        self._kill_at: float | None = None
        self._killed_at: float | None = None
        """When the scheduler, which has begun to take the job down, kills what is left."""
        self.pace: Pace | None = None
        self._looked_at_pace = 0.0
        self._preflight_seconds: float | None = None

    # -- the whole ------------------------------------------------------------------------------------------------

    def run_attempts(self) -> int:
        if (lost := self.ledger.close_lost(self.run)) is not None:
            self._say(f"attempt {lost.attempt} ended without a word ({lost.reason}); going on from what it left")
        if self._is_over():
            self._say("this job already ended; nothing to do")
            return 0
        if (code := self._end_before_start()) is not None:
            return code
        if (code := self._leave_excluded_nodes()) is not None:
            return code
        for line in self.launch.setup_per_node:
            if failed := run_on_each_node(line, launch=self.launch):
                return record_setup_failure(self.run, exit_code=failed, name=f"environment.setup_per_node: {line}")
        while True:
            verdict = self._run_one()
            if verdict.decision == "restart":
                self.restarts += 1
                continue
            if verdict.decision == "requeue":
                return self._requeue(verdict)
            return _exit_code(verdict)

    def _is_over(self) -> bool:
        jobs = (read_json(self.run.record) or {}).get("job_ids", [])
        if self.allocation.job_id in jobs[:-1]:
            return True  # resumed in another job, while this one was still on its way back through the queue
        last = self.ledger.ended_by(self.allocation.job_id)
        if last is not None and last.reason == "cancelled":
            # Told by the signals alone, a cancel is a guess; that Slurm started the job again refutes it.
            return cancel_was_asked(self.run)
        return last is not None

    def _end_before_start(self) -> int | None:
        """Honour what was decided while the job waited in the queue."""
        for name, request in pending_requests(self.run):
            if request.then in ("cancel", "pause"):
                honour(self.run, name)
                verdict = Verdict(
                    reason=request.reason,
                    decision="end" if request.then == "cancel" else "pause",
                    detail="before the ranks started",
                )
                self._write_end(verdict, started=time.time())
                return _exit_code(verdict)
            if request.then == "requeue":
                honour(self.run, name)  # nothing runs that could be stopped: it just came back
        if (cap := self.ledger.cap(self.allocation.jobs, self.launch.resilience)) is not None:
            verdict = Verdict(reason="failed", decision="end", error_class="cap", detail=cap)
            self._write_end(verdict, started=time.time())
            return _exit_code(verdict)
        return None

    def _leave_excluded_nodes(self) -> int | None:
        """Back into the queue where the job has come to a node that it was to keep away from."""
        bad = self.placement.misplaced()
        if not bad:
            return None
        if not self.placement.worth_leaving(bad):
            self._say(f"going on, though {', '.join(bad)} was excluded: see {self.run.excluded_nodes}")
            return None
        detail = f"started on {', '.join(bad)}, which the run keeps away from"
        self._say(detail)
        return self._requeue(Verdict(reason="failed", decision="requeue", detail=detail))

    def _requeue(self, verdict: Verdict) -> int:
        chained = isinstance(self.allocation, ChainedAllocation)
        if verdict.by_scheduler and not chained:
            self._say("the scheduler brings this job back by itself")
            if verdict.exclude:
                self.placement.tell_scheduler(now=True)
            return EXIT_CONTINUED
        self._say("the next job of the chain goes on" if chained else "requeueing")
        self.placement.tell_scheduler()
        problem = self.allocation.requeue()
        if problem:
            cancelled = problem == TAKEN_DOWN
            self._write_end(
                Verdict(
                    reason="cancelled" if cancelled else verdict.reason,
                    decision="end" if cancelled else "pause",
                    detail=f"not requeued: {problem}",
                ),
                started=time.time(),
            )
        return EXIT_CONTINUED

    # -- one attempt ----------------------------------------------------------------------------------------------

    def _run_one(self) -> Verdict:
        self.attempt = self.ledger.next_attempt
        self._forget_stop()
        self.run.attempt(self.attempt).mkdir(parents=True, exist_ok=True, mode=0o750)
        self._forget_results()
        self._ask_scheduler()
        started = time.time()
        newest = layout.newest(self.run.checkpoints)
        self.ledger.start(
            AttemptStart(
                attempt=self.attempt,
                time=started,
                job_id=self.allocation.job_id,
                restart_count=self.allocation.restart_count,
                nodes=self.placement.nodes,
                ranks=self.launch.ranks,
                checkpoint=newest.name if newest else None,
                checkpoint_step=newest.step if newest else None,
                queued_at=self._queued_at,
                allocated_at=self._allocated_at,
            )
        )
        self._say(
            f"attempt {self.attempt}: ranks: {self.launch.ranks}, nodes: {len(self.placement.nodes)}, "
            f"from {newest.name if newest else 'the beginning'}"
        )
        if (verdict := self._preflight()) is not None:
            self._write_end(verdict, started=started)
            return verdict
        env = {"HPCACCEL_ATTEMPT": str(self.attempt)}
        if self.end_time is not None:
            env["HPCACCEL_DEADLINE"] = repr(self.end_time)
        nodes, avoid = self.placement.nodes, self.placement.others
        ranks = start_ranks(self.run, self.launch, attempt=self.attempt, nodes=nodes, avoid=avoid, env=env)
        self._hangs = HangWatch(
            self.run, self.attempt, setting=self.launch.resilience.hang_timeout_seconds, say=self._say
        )
        code = self._watch(ranks)
        verdict = self._conclude(code)
        self._write_end(verdict, started=started, exit_code=code)
        return verdict

    def _watch(self, ranks: Ranks) -> int:
        while (code := ranks.poll()) is None:
            received = signal.sigtimedwait(WATCHED, LOOK_SECONDS)
            number = received.si_signo if received else None
            if number == signal.SIGUSR2:
                self._hear_warning(ranks)
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._hear_end(ranks)
            self._hear_users(ranks)
            self._watch_clock(ranks)
            if self._hangs.look(ranks, judging=self._kill_at is None):
                ranks.kill()
                self._kill_at = time.monotonic() + KILL_AGAIN_SECONDS
        return code

    def _hear_warning(self, ranks: Ranks) -> None:
        situation = self._ask_scheduler()
        if situation.preempted:
            self._request(ranks, "preempted")
            return
        limit = self.launch.resilience.warning_seconds + EARLY_SECONDS
        if self.end_time is None or self.end_time - time.time() <= limit:
            self._request(ranks, "time_limit")
        elif self._granted is not None and self.end_time > self._granted + 1:
            self._say("a warning came, but the time limit was extended: going on")
        else:
            self._request(ranks, "stop")  # somebody's own `scancel --batch --signal=USR2`

    def _hear_end(self, ranks: Ranks) -> None:
        """SIGTERM to the batch step: a preemption without grace, a cancel, or somebody's own `kill`."""
        heard = time.time()
        if isinstance(self.allocation, LocalAllocation):
            self.allocation.cancelled()
        situation = self._ask_scheduler()
        if not situation.running and situation.known and self.allocation.kill_wait_seconds is not None:
            self._killed_at = heard + self.allocation.kill_wait_seconds
        if situation.running or not situation.known:
            self._request(ranks, "preempted" if situation.preempted else "stop")
        elif situation.comes_back or situation.taken_for:
            self._request(ranks, situation.taken_for or "preempted")
        else:
            self.cancel_asked = True
            self._request(ranks, "cancelled", then="cancel")

    def _hear_users(self, ranks: Ranks) -> None:
        if self.stop is None and ranks_ask(self.run, self.attempt):
            # In a preemption with grace time Slurm signals the ranks alone.
            situation = self._ask_scheduler(patient=False)
            self._request(ranks, "preempted" if situation.preempted else "stop")
        for name, request in pending_requests(self.run):
            honour(self.run, name)
            if request.then == "cancel":
                self.cancel_asked = True
            self._request(ranks, request.reason, then=request.then)

    def _watch_clock(self, ranks: Ranks) -> None:
        now = time.time()
        if isinstance(self.allocation, LocalAllocation) or now - self._asked_scheduler > ASK_SCHEDULER_SECONDS:
            self._ask_scheduler()
        late = self._lead()
        if self.stop is None and self.end_time is not None and now > self.end_time - late:
            # Slurm tells nobody that it has extended a limit.
            self._ask_scheduler(patient=False)
            if now > self.end_time - late:
                self._request(ranks, "time_limit")
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._say("the ranks did not leave in time: killing them")
            ranks.kill()
            self._kill_at = time.monotonic() + KILL_AGAIN_SECONDS

    def _request(self, ranks: Ranks, reason: Reason, *, then: str = "requeue") -> None:
        """Ask the ranks to stop: the reason first, then the signal."""
        if self.stop is not None and self.stop.then == then:
            return
        self._look_at_pace()
        patience = self._patience(reason)
        request = StopRequest(
            reason=reason,
            then=then,  # type: ignore[arg-type]
            time=time.time(),
            deadline=self._killed_at or (None if self._left(reason) is None else time.time() + patience),
        )
        self.stop = request
        write_json(self.run.stop(self.attempt), to_dict(request))
        self._say(f"asking the ranks to stop: {reason} ({then}){forecast(self.pace, request)}")
        if self._kill_at is None and then != "finish":
            self._kill_at = time.monotonic() + patience
        ranks.ask()

    def _lead(self) -> float:
        """How long before the end the ranks are asked to stop, in seconds."""
        now = time.time()
        left = (self.end_time or now) - now
        if self.end_time is not None and now - self._looked_at_pace > min(LOOK_AT_PACE_SECONDS, left / 10):
            before = self.pace
            self._look_at_pace()
            if before is None and self.pace is not None:
                for line in warnings(self.pace, self.launch.resilience, self.allocation.kill_wait_seconds):
                    self._say(line)
        # Slurm's own warning comes before this; it is for a warning that got lost, and for the local backend.
        warning = self.launch.resilience.warning_seconds * (1.0 if self.launch.local else 0.5)
        limit = (self.end_time or now) - self._began
        return lead_seconds(self.pace, warning_seconds=warning, limit_seconds=limit)

    def _look_at_pace(self) -> None:
        self._looked_at_pace = time.time()
        self.pace = read_pace(self.run, self.attempt) or self.pace

    def _left(self, reason: Reason) -> float | None:
        """Until the processes are killed, in seconds, where the scheduler will do that."""
        if reason not in ("time_limit", "preempted") or self.end_time is None:
            return None
        return self.end_time - time.time()

    def _patience(self, reason: Reason) -> float:
        """How long the ranks may take to leave, in seconds."""
        timeout = float(self.launch.resilience.stop_timeout_seconds)
        left = None if self._killed_at else self._left(reason)  # then nobody needs time to requeue
        return patience_seconds(self.pace, stop_timeout_seconds=timeout, left_seconds=left)

    # -- its end --------------------------------------------------------------------------------------------------

    def _conclude(self, code: int) -> Verdict:
        for name, request in pending_requests(self.run):
            if request.then == "cancel":
                honour(self.run, name)
                self.cancel_asked = True
        if isinstance(self.allocation, LocalAllocation) and signal.SIGTERM in signal.sigpending():
            self.allocation.cancelled()
        situation = self._ask_scheduler()
        return self._decide(code, situation, self._why(code) if code else None)

    def _decide(self, code: int, situation: Situation, failure: Failure | None) -> Verdict:
        blamed = situation.failed_nodes or (failure.nodes if failure else ())
        excludable, spare = self.placement.excludable(blamed)
        verdict = judge(
            Seen(
                exit_code=code,
                outcome=read_outcome(self.run, self.attempt),
                stop=self.stop,
                situation=situation,
                cancel_asked=self.cancel_asked,
                can_requeue=self.launch.resilience.requeue,
                restarts_left=self.launch.resilience.restart_in_place - self.restarts,
                failure=failure,
                excludable=excludable,
                spare=spare,
            )
        )
        if verdict.decision in ("restart", "requeue"):
            line = self._end_line(verdict, started=time.time(), exit_code=code)
            cap = self.ledger.cap(self.allocation.jobs, self.launch.resilience, last=line)
            if cap is not None:
                detail = f"{cap}; the last: {verdict.detail}" if verdict.detail else cap
                verdict = dataclasses.replace(verdict, decision="end", detail=detail, exclude=())
        if verdict.exclude:
            why, detail = verdict.error_class or "", verdict.detail
            self.placement.exclude(verdict.exclude, why=why, detail=detail, attempt=self.attempt)
            self._say(f"keeping away from {', '.join(verdict.exclude)}: {why}")
        return verdict

    def _preflight(self) -> Verdict | None:
        """What follows where the ranks must not start on these nodes."""
        checked = preflight(
            self.run,
            self.launch,
            attempt=self.attempt,
            nodes=self.placement.nodes,
            avoid=self.placement.others,
            say=self._say,
        )
        self._preflight_seconds = checked.seconds
        failure = checked.failure(self.placement.nodes)
        if failure is None:
            return None
        verdict = self._decide(1, self._ask_scheduler(), failure)
        if verdict.reason == "failed" and failure.nodes and not verdict.exclude:
            self._say(f"starting all the same: {', '.join(failure.nodes)} cannot be left out")
            return None
        return verdict

    def _why(self, code: int) -> Failure:
        def classified(step_state: JobState | None = None) -> Failure:
            return classify(
                self.run,
                attempt=self.attempt,
                exit_code=code,
                nodes=self.placement.nodes,
                ranks_per_node=self.launch.ranks_per_node,
                step_state=step_state,
            )

        failure = classified()
        step = read_json(self.run.attempt(self.attempt) / "step.json")
        if failure.cause.name == "killed" and step is not None:
            # By whom? The accounting may know that the memory was used up.
            return classified(self.allocation.step_state(step["job_id"], step["step_id"]))
        return failure

    def _end_line(self, verdict: Verdict, *, started: float, exit_code: int | None) -> AttemptEnd:
        outcome = read_outcome(self.run, self.attempt)
        newest = layout.newest(self.run.checkpoints)
        return AttemptEnd(
            attempt=self.attempt or self.ledger.next_attempt,
            time=time.time(),
            reason=verdict.reason,
            decision=verdict.decision,
            error_class=verdict.error_class,
            detail=verdict.detail,
            advice=verdict.advice,
            nodes_blamed=list(verdict.nodes_blamed),
            nodes_excluded=list(verdict.exclude),
            preflight_seconds=self._preflight_seconds,
            exit_code=exit_code,
            seconds=round(time.time() - started, 3),
            resumed_step=resumed_step(self.run, self.attempt),
            last_step=outcome.step if outcome else last_step(self.run, self.attempt),
            checkpoint=newest.name if newest else None,
            checkpoint_step=newest.step if newest else None,
        )

    def _write_end(self, verdict: Verdict, *, started: float, exit_code: int | None = None) -> None:
        self.ledger.end(self._end_line(verdict, started=started, exit_code=exit_code))
        what = f"{verdict.reason}: {verdict.detail}" if verdict.detail else verdict.reason
        self._say(f"attempt {self.ledger.ends[-1].attempt} ended, {what}; then: {verdict.decision}")

    # -- helpers --------------------------------------------------------------------------------------------------

    def _ask_scheduler(self, *, patient: bool = True) -> Situation:
        situation = self.allocation.situation(patient=patient)
        self._asked_scheduler = time.time()
        if situation.known and situation.running:
            self.end_time = situation.end_time
            self._queued_at, self._allocated_at = situation.submit_time, situation.start_time
            self._granted = self._granted or situation.end_time
        return situation

    def _forget_results(self) -> None:
        """An old result must not pass for this attempt's: submitit takes any that it finds."""
        if self.launch.callable:
            for path in self.run.submitit.glob("*_result.pkl"):
                path.unlink()

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}"
        print(f"hpcaccel: {line}", flush=True)
        if not self.attempt:
            return
        try:
            with self.run.supervisor_log(self.attempt).open("a", encoding="utf-8") as log:
                log.write(line + "\n")
        except OSError as error:
            print(f"hpcaccel: cannot write {log.name}: {error.strerror}", flush=True)


def _exit_code(verdict: Verdict) -> int:
    if verdict.reason == "completed":
        return 0
    if verdict.decision == "pause":
        return EXIT_CONTINUED
    if verdict.reason == "cancelled":
        return 130
    return HpcaccelError.exit_code if verdict.error_class != "user_mistake" else 2
