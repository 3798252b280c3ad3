"""The supervisor: starts the ranks, hears the scheduler and the user, writes the ledger, decides what follows.

One thread, no handlers: the signals that matter are blocked and waited for, so nothing ever happens in the middle of
something else.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from hpcaccel import checkpoint_files
from hpcaccel.core.attempt_steps import complete_timing
from hpcaccel.core.records import EXIT_CONTINUED, AttemptEnd, AttemptStart, Decision, pruned
from hpcaccel.core.run_dir import RunDir, make_folder, read_json
from hpcaccel.core.secret_masking import Mask
from hpcaccel.errors import HpcaccelError
from hpcaccel.node import lease
from hpcaccel.node.allocation import TAKEN_DOWN, Allocation, Situation
from hpcaccel.node.allocation.chained import ChainedAllocation, current_allocation
from hpcaccel.node.batch import killed_by
from hpcaccel.node.child_processes import WATCHED, take_over_signals
from hpcaccel.node.control_requests import cancel_was_asked, honour, pending_requests
from hpcaccel.node.decision import Seen, Verdict, judge
from hpcaccel.node.disk_space import LEAST_BYTES, SHORT_OF_ROOM, WaitForRoom, bytes_to_save, explained_by_room, shortage
from hpcaccel.node.failures.causes import cause
from hpcaccel.node.failures.classify import Failure, classify
from hpcaccel.node.failures.exclusion import Placement
from hpcaccel.node.failures.hangs import HangWatch
from hpcaccel.node.failures.preflight import preflight
from hpcaccel.node.launch_spec import Launch, read_launch
from hpcaccel.node.launchers.het_components import Components, component_nodes
from hpcaccel.node.launchers.node_step import BeforeRanks
from hpcaccel.node.launchers.provision import Provision, clean_stage
from hpcaccel.node.launchers.start_ranks import Ranks, end_lost_step, run_on_each_node, start_ranks
from hpcaccel.node.ledger import Ledger, how_far, read_outcome
from hpcaccel.node.retry_io import PATIENCE_SECONDS, gone, if_possible, patiently
from hpcaccel.node.stop_sequence import Inquiry, Stopping
from hpcaccel.node.upstream_runs import hindrance
from hpcaccel.slurm.states import JobState

__all__ = [
    "WATCHED",
    "Supervisor",
    "exit_code_of",
    "record_killed",
    "record_setup_failure",
    "supervise",
    "take_over_signals",
]

T = TypeVar("T")

LOOK_SECONDS = 1.0


def supervise(run: RunDir) -> int:
    """Run the ranks of ``run`` until nothing is left to do in this allocation; the batch step's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    take_over_signals()
    return _with_lease(run, lambda supervisor: supervisor.run_attempts())


def _with_lease(run: RunDir, work: Callable[[Supervisor], int]) -> int:
    """Let a supervisor of ``run`` work in this allocation, unless its chain has ended; the batch step's exit code.

    Raises:
        RunBusy: another supervisor is alive.
    """
    launch = read_launch(run)
    allocation = current_allocation(run, launch)
    patiently(
        lambda: lease.acquire(run, job_id=allocation.job_id, restart_count=allocation.restart_count),
        run=run,
        say=_print,
    )
    try:
        if isinstance(allocation, ChainedAllocation) and not allocation.begin():
            last = Ledger.read(run).last_word
            return EXIT_CONTINUED if last is None else exit_code_of(last)
        return work(Supervisor(run, launch, allocation))
    finally:
        if isinstance(allocation, ChainedAllocation):
            allocation.end()
        lease.release(run)


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
            job_id=allocation.job_id,
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
    _print(detail)
    return 1


def record_killed(run: RunDir, why: str) -> int:
    """Write the end of an attempt whose supervisors were killed one after another; the batch step's exit code."""
    return _with_lease(run, lambda supervisor: supervisor.give_up(why))


class Supervisor:
    def __init__(self, run: RunDir, launch: Launch, allocation: Allocation, *, ledger: Ledger | None = None) -> None:
        self.run = run
        self.launch = launch
        self.allocation = allocation
        self.ledger = ledger or Ledger.read(run)
        self.placement = Placement(run, launch, allocation)
        self.restarts = 0
        self.attempt = 0
        self.inquiry = Inquiry(allocation)
        self.provision = Provision(run, launch, watch=self._watch_before)
        self._killed = killed_by()
        """The signal that ended the supervisor before this one, in the same batch step."""
        self._mask = Mask.of(run)
        self._preflight_seconds: float | None = None

    # -- the whole ------------------------------------------------------------------------------------------------

    def run_attempts(self) -> int:
        if (lost := self._close_lost()) is not None:
            self._say(f"attempt {lost.attempt} ended without a word ({lost.reason}); going on from what it left")
        if (code := self._code_if_over()) is not None:
            self._say(f"this job already ended; nothing to do (exit code {code})")
            return code
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
            self._clean()
            if verdict.decision == "requeue":
                return self._requeue(verdict)
            return exit_code_of(verdict)

    def _code_if_over(self) -> int | None:
        """The exit code with which a job ends that Slurm has started though the run, or its part of it, is over.

        It is the one that the run ended with: jobs that wait for this one must not take a failure for a success.
        """
        jobs = (read_json(self.run.record) or {}).get("job_ids", [])
        if self.allocation.job_id in jobs[:-1]:
            return EXIT_CONTINUED  # resumed in another job, while this one was still on its way back through the queue
        last = self.ledger.ended_by(self.allocation.job_id)
        if last is None:
            return None
        if last.reason == "cancelled" and not cancel_was_asked(self.run):
            # Told by the signals alone, a cancel is a guess; that Slurm started the job again refutes it.
            return None
        return exit_code_of(last)

    def _end_before_start(self) -> int | None:
        """Honour what was decided while the job waited in the queue."""
        for name, request in pending_requests(self.run):
            if request.then in ("cancel", "pause") or pruned(request):
                honour(self.run, name)
                verdict = Verdict(
                    reason=request.reason,
                    decision="pause" if request.then == "pause" and not pruned(request) else "end",
                    detail="before the ranks started",
                )
                self._write_end(verdict, started=time.time())
                return exit_code_of(verdict)
            if request.then == "requeue":
                honour(self.run, name)  # nothing runs that could be stopped: it just came back
        if not self.ledger.starts and (why := hindrance(self.launch)):
            row = cause("dependency")
            verdict = Verdict(reason="cancelled", decision="end", error_class=row.name, detail=why, advice=row.advice)
            self._write_end(verdict, started=time.time())
            return exit_code_of(verdict)
        if (cap := self.ledger.cap(self.allocation.jobs, self.launch.resilience)) is not None:
            verdict = Verdict(reason="failed", decision="end", error_class="cap", detail=cap)
            self._write_end(verdict, started=time.time())
            return exit_code_of(verdict)
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

    def _close_lost(self, *, given_up: str = "") -> AttemptEnd | None:
        """Write the end of an attempt that has none; of one of this very allocation nothing may run any more.

        Args:
            given_up: why no supervisor is started here any more, if none is.
        """
        here = self.ledger.unfinished()
        if here is None or (here.job_id, here.restart_count) != (self.allocation.job_id, self.allocation.restart_count):
            return self._patiently(lambda: self.ledger.close_lost(self.run))
        if not self.launch.local:
            end_lost_step(self.run, here.attempt)
        if given_up:
            return self._patiently(lambda: self._close_killed(None, given_up))
        if not self._killed:
            return self._patiently(lambda: self.ledger.close_lost(self.run))
        # What a user wants to follow still does; else the ranks start again where they were.
        decision: Decision | None = None if cancel_was_asked(self.run) else "restart"
        return self._patiently(lambda: self._close_killed(decision, f"signal {self._killed}; started again here"))

    def _close_killed(self, decision: Decision | None, why: str) -> AttemptEnd | None:
        return self.ledger.close_lost(self.run, decision=decision, killed="its supervisor", why=why)

    def give_up(self, why: str) -> int:
        """Write down that no supervisor stays alive here, and try again elsewhere; the batch step's exit code."""
        self._close_lost(given_up=why)
        if (code := self._code_if_over()) is not None:
            return code
        started = self._begin().time
        self.restarts = self.launch.resilience.restart_in_place
        self.stopping.hear_the_last()
        verdict = self._decide(1, self.inquiry.ask(), Failure(cause=cause("supervisor"), detail=why))
        self._write_end(verdict, started=started)
        if verdict.decision != "requeue":
            return exit_code_of(verdict)
        if self.launch.local:
            lease.release(self.run)  # this process becomes the next start's batch step, and would count as the holder
        return self._requeue(verdict)

    # -- one attempt ----------------------------------------------------------------------------------------------

    def _run_one(self) -> Verdict:
        self._prepare_submitit()
        self.inquiry.look()
        line = self._begin()
        started = line.time
        self._say(
            f"attempt {self.attempt}: ranks: {self.launch.ranks}, nodes: {len(self.placement.nodes)}, "
            f"from {line.checkpoint or 'the beginning'}"
        )
        if (verdict := self._before_ranks()) is not None:
            self._write_end(verdict, started=started)
            return verdict
        where = component_nodes(self.launch, os.environ, self.placement.nodes)
        env = {"HPCACCEL_ATTEMPT": str(self.attempt), **self.provision.env, **where}
        if self.inquiry.end_time is not None:
            env["HPCACCEL_DEADLINE"] = repr(self.inquiry.end_time)
        nodes, avoid = self.placement.nodes, self.placement.others
        launch = self.provision.launch
        self._components = Components(self.run, launch, attempt=self.attempt, env=env)
        ranks = start_ranks(self.run, launch, attempt=self.attempt, nodes=nodes, avoid=avoid, env=env)
        self._hangs = HangWatch(
            self.run, self.attempt, setting=self.launch.resilience.hang_timeout_seconds, say=self._say
        )
        code = self._watch(ranks)
        verdict = self._conclude(code)
        self._write_end(verdict, started=started, exit_code=code)
        if self.inquiry.over_since is None:  # else Slurm is ending them
            self._components.end()
        return verdict

    def _begin(self) -> AttemptStart:
        """The next attempt, with a folder and a line in the ledger."""
        self.attempt = self.ledger.next_attempt
        self.stopping = Stopping(self.run, self.launch, self.inquiry, attempt=self.attempt, say=self._say)
        self._preflight_seconds = None
        folder = self.run.attempt(self.attempt)
        self._patiently(lambda: make_folder(folder, within=self.run.path))
        newest = checkpoint_files.newest(self.run.checkpoints)
        line = AttemptStart(
            attempt=self.attempt,
            time=time.time(),
            job_id=self.allocation.job_id,
            restart_count=self.allocation.restart_count,
            nodes=self.placement.nodes,
            ranks=self.launch.ranks,
            checkpoint=newest.name if newest else None,
            checkpoint_step=newest.step if newest else None,
            queued_at=self.inquiry.queued_at,
            allocated_at=self.inquiry.allocated_at,
        )
        self._patiently(lambda: self.ledger.start(line))
        return line

    def _watch(self, ranks: Ranks) -> int:
        while (code := ranks.poll()) is None:
            received = signal.sigtimedwait(WATCHED, LOOK_SECONDS)
            self.stopping.hear(ranks, received.si_signo if received else None)
            if self._hangs.look(ranks, judging=self.stopping.patient):
                self.stopping.kill(ranks)
            if self.stopping.patient and (failed := self._components.failed()) is not None:
                self._say(f"ending the ranks: {failed}")
                self.stopping.kill(ranks)
        return code

    # -- its end --------------------------------------------------------------------------------------------------

    def _conclude(self, code: int) -> Verdict:
        self.stopping.hear_the_last()
        situation = self.inquiry.ask(patient=not self.stopping.cancel_asked)  # which holds whatever Slurm says
        # Slurm's word counts before any log where it takes the job down, and leaves no time to read them.
        explained = situation.known and not situation.running
        return self._decide(code, situation, self._why(code) if code and not explained else None)

    def _decide(self, code: int, situation: Situation, failure: Failure | None) -> Verdict:
        if failure is not None:  # its text goes into the ledger, the list of nodes, a sweep's journal
            failure = dataclasses.replace(failure, detail=self._mask(failure.detail))
        blamed = situation.failed_nodes or (failure.nodes if failure else ())
        excludable, spare = self.placement.excludable(blamed)
        verdict = judge(
            Seen(
                exit_code=code,
                outcome=read_outcome(self.run, self.attempt),
                stop=self.stopping.request,
                situation=situation,
                cancel_asked=self.stopping.cancel_asked,
                can_requeue=bool(self.launch.resilience.requeue),
                restarts_left=self.launch.resilience.restart_in_place - self.restarts,
                failure=failure,
                excludable=excludable,
                spare=spare,
                has_checkpoint=checkpoint_files.newest(self.run.checkpoints) is not None,
                results=self._has_results(),
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
            if_possible(
                lambda: self.placement.exclude(verdict.exclude, why=why, detail=detail, attempt=self.attempt),
                say=self._say,
            )
            self._say(f"keeping away from {', '.join(verdict.exclude)}: {why}")
        return verdict

    def _preflight(self) -> Verdict | None:
        """What follows where the ranks must not start on these nodes."""
        checked = preflight(
            self.run,
            self.provision.launch,
            attempt=self.attempt,
            nodes=self.placement.nodes,
            avoid=self.placement.others,
            say=self._say,
        )
        self._preflight_seconds = checked.seconds
        failure = checked.failure(self.placement.nodes)
        if failure is None:
            return None
        verdict = self._decide(1, self.inquiry.ask(), failure)
        if verdict.reason == "failed" and failure.nodes and not verdict.exclude:
            self._say(f"starting all the same: {', '.join(failure.nodes)} cannot be left out")
            return None
        return verdict

    def _before_ranks(self) -> Verdict | None:
        """The image, the checks, the staged data; what follows where the ranks cannot start, or are not to any more."""
        failure = self._room() or self.provision.image()
        if failure is None and self.stopping.request is None:
            if (verdict := self._preflight()) is not None:
                return verdict
            failure = self.provision.stage(avoid=self.placement.others)
        if failure is None and self.stopping.request is None:
            return None
        self.stopping.hear_the_last()
        return self._decide(1, self.inquiry.ask(), failure)

    def _room(self) -> Failure | None:
        """Wait for some minutes where the run directory takes nothing; why the ranks cannot start after that."""
        last = self.ledger.ends[-1] if self.ledger.ends else None
        found_none = last is not None and last.error_class in SHORT_OF_ROOM
        least = LEAST_BYTES if self.launch.resilience.preflight != "off" else 0
        if not least and not found_none:
            return None
        to_save = bytes_to_save(self.run, last.detail) if last is not None and found_none else 0
        wait = WaitForRoom(lambda: shortage(self.run, needed=least, to_save=to_save))
        if wait.missing is None:
            return None
        if not self.run.path.is_dir():
            raise gone(self.run)
        self._say(f"{wait.missing.text}. Waiting for {PATIENCE_SECONDS / 60:.0f} minutes for that to change")
        self._watch_before(wait)
        if wait.missing is None or self.stopping.request is not None:
            return None
        failure = wait.missing.failure()
        detail = f"{failure.detail}; for {PATIENCE_SECONDS / 60:.0f} minutes"
        return dataclasses.replace(failure, cause=dataclasses.replace(failure.cause, follows="end"), detail=detail)

    def _watch_before(self, step: BeforeRanks | WaitForRoom) -> int:
        while (code := step.poll()) is None:
            received = signal.sigtimedwait(WATCHED, LOOK_SECONDS)
            self.stopping.hear(step, received.si_signo if received else None)
        return code

    def _clean(self) -> None:
        if self.inquiry.over_since is not None:
            return  # no step starts any more
        if problem := clean_stage(self.run, self.launch, avoid=self.placement.others):
            self._say(problem)

    def _why(self, code: int) -> Failure:
        def classified(step_state: JobState | None = None) -> Failure:
            failure = classify(
                self.run,
                attempt=self.attempt,
                exit_code=code,
                nodes=self.placement.nodes,
                ranks_per_node=self.launch.ranks_per_node,
                step_state=step_state,
                in_container=self.launch.container is not None,
            )
            # Here already: a piece of a secret, cut at the longest length, is known only at the end of a text.
            return dataclasses.replace(failure, detail=self._mask(failure.detail))

        if (failed := self._components.failed()) is not None:
            # The ranks that miss it fail in ways of their own.
            return Failure(cause=cause("component"), detail=failed)
        if not self.run.path.is_dir():
            raise gone(self.run)
        failure = explained_by_room(self.run, classified())
        step = read_json(self.run.attempt(self.attempt) / "step.json")
        if failure.cause.name == "killed" and step is not None:
            # By whom? The accounting may know that the memory was used up.
            return classified(self.allocation.step_state(step["job_id"], step["step_id"]))
        return failure

    def _end_line(self, verdict: Verdict, *, started: float, exit_code: int | None) -> AttemptEnd:
        return AttemptEnd(
            attempt=self.attempt or self.ledger.next_attempt,
            time=time.time(),
            job_id=self.allocation.job_id,
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
            **how_far(self.run, self.attempt),
        )

    def _write_end(self, verdict: Verdict, *, started: float, exit_code: int | None = None) -> None:
        line = self._end_line(verdict, started=started, exit_code=exit_code)
        if_possible(lambda: complete_timing(self.run, line.attempt), say=self._say)
        if verdict.decision == "requeue":
            if_possible(
                lambda: self.ledger.end(line), say=self._say
            )  # else the next start writes it, from what is left
        else:
            self._patiently(lambda: self.ledger.end(line))
        what = f"{verdict.reason}: {verdict.detail}" if verdict.detail else verdict.reason
        self._say(f"attempt {line.attempt} ended, {what}; then: {verdict.decision}")

    # -- helpers --------------------------------------------------------------------------------------------------

    def _has_results(self) -> bool:
        return self.launch.callable and len(list(self.run.submitit.glob("*_result.pkl"))) >= self.launch.ranks

    def _prepare_submitit(self) -> None:
        """An old result must not pass for this attempt's: submitit takes any that it finds. And it waits for a pickle
        that bears this job's number, which a submit that was killed behind sbatch has not written."""
        if not self.launch.callable:
            return
        for path in self.run.submitit.glob("*_result.pkl"):
            path.unlink()
        with suppress(FileExistsError):
            self.run.submitit.joinpath(f"{self.allocation.job_id}_submitted.pkl").symlink_to(self.run.call.name)

    def _patiently(self, write: Callable[[], T]) -> T:
        return patiently(write, run=self.run, say=self._say)

    def _say(self, text: str) -> None:
        line = self._mask(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}")
        _print(line)
        if self.attempt:
            if_possible(lambda: self._log(line), say=_print)

    def _log(self, line: str) -> None:
        with self.run.supervisor_log(self.attempt).open("a", encoding="utf-8") as log:
            log.write(line + "\n")


def _print(line: str) -> None:
    try:
        print(f"hpcaccel: {line}", flush=True)
    except OSError:
        pass  # the disk with the job's output is full; what was to be said stays in the buffer


def exit_code_of(end: Verdict | AttemptEnd) -> int:
    """The batch step's exit code at the end of a run, or of its part in this job."""
    if end.reason in ("completed", "pruned"):
        return 0
    if end.decision == "pause":
        return EXIT_CONTINUED
    if end.reason == "cancelled":
        return 130
    return HpcaccelError.exit_code if end.error_class != "user_mistake" else 2
