"""The tuner of a sweep's worker: chooses trials, prunes them, and records their results in the study.

A child of the worker process (``hpcaccel.node.sweep.sweep_worker``) runs ``main`` with the sweep's directory and the
worker's number as arguments. Worker and tuner exchange JSON lines over the tuner's standard input and output; its
standard error goes to the worker's log. The tuner may be killed at any moment: its state is in the journal and in the
trials' directories, and the next tuner continues from there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.sweeps.budget import Allowance, in_hours
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_notes import BUDGET, OwnershipNotes, is_extended
from hpcaccel.sweeps.journal_reader import StudyRecord
from hpcaccel.sweeps.next_trial import Impossible, Nothing, TrialQueue
from hpcaccel.sweeps.pruning import rule_of
from hpcaccel.sweeps.results import Goal
from hpcaccel.sweeps.retry import queue_again
from hpcaccel.sweeps.running_trial import RunningTrial
from hpcaccel.sweeps.trial_files import DeferredCleanup
from hpcaccel.sweeps.trial_result import EndCounts, TrialOutcome, describe_outcome, hopeless, record_outcome
from hpcaccel.sweeps.tuner_protocol import Ended, Event, Hello, StopTrials, WorkerConnection, WorkerGone

if TYPE_CHECKING:
    from hpcaccel.sweeps.study import SweepStudy

__all__ = ["Tuner", "main"]

LOOK_SECONDS = 0.5
"""Interval at which running trials are checked; messages from the worker are read at once."""
PAUSE_SECONDS = 30.0
"""Interval between searches for a trial to fill an empty slot; a trial that ends causes a search at once."""


def main(argv: Sequence[str] | None = None) -> None:
    directory, index = sys.argv[1:] if argv is None else argv
    worker = WorkerConnection.on_stdio()
    try:
        hello = worker.receive_hello()
        Tuner(SweepDir(directory), int(index), hello, worker).work()
    except WorkerGone:
        sys.exit(0)
    except HpcaccelError as error:
        print(f"hpcaccel: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


class Tuner:
    """The tuner of one worker.

    Raises:
        RunDirectoryError: ``sweep`` is not a sweep directory, or is no longer writable. Recorded results are
            kept, and running trials remain assigned to this worker.
    """

    def __init__(
        self, sweep: SweepDir, index: int, hello: Hello, worker: WorkerConnection, *, slurm: Slurm | None = None
    ) -> None:
        self.sweep = sweep
        self.worker = worker
        self.slots = hello.slots
        self.definition = definition = read_definition(sweep)
        self.section = definition.spec.sweep
        self.goal = Goal.of(self.section.model_dump(mode="json"))
        self.rule = rule_of(self.section)

        self.record = StudyRecord(sweep.journal)
        self.notes = OwnershipNotes(self.record)
        self.allowance = Allowance(sweep, definition, hello, record=self.record)
        self.queue = TrialQueue(
            sweep,
            worker=index,
            token=f"{hello.job_id}.{hello.restart_count}.{os.getpid()}",
            definition=definition,
            study=lambda: self.study,
            record=self.record,
            notes=self.notes,
            account=self.allowance.account,
            slurm=slurm,
        )
        self.cleanup = DeferredCleanup(sweep, keep=self.section.keep_checkpoints, goal=self.goal, record=self.record)
        self.running: dict[int, RunningTrial] = {}
        """Running trials, by number."""
        self.stopping = False
        self._disk_error = ""
        """Message if a full or read-only file system has ended a trial; else empty. If it is set, no trial starts."""
        self._fill_again_at = 0.0
        self._counts = EndCounts(self.section.retries)
        self.cleanup.catch_up(index, self.notes.read())
        for slot, number in hello.running.items():
            self._adopt(number, int(slot))

    @cached_property
    def study(self) -> SweepStudy:
        """The study in Optuna, opened on first use."""
        from hpcaccel.sweeps.study import SweepStudy

        return SweepStudy.of(self.sweep, self.definition.spec)

    # -- main loop ------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Run until there are no more trials for this worker, or the worker process is gone (``WorkerGone``)."""
        while True:
            end = self._fill()
            for problem in self.cleanup.run():
                self._log(problem)
            if end is not None and not self.running and not self._waits(end):
                self._log(f"no more trials for this worker: {end.why}")
                self.worker.end(end.why, then=end.then)
                return
            for event in self.worker.receive(LOOK_SECONDS):
                self._handle(event)
            self._check_running()

    def _handle(self, event: Event) -> None:
        if isinstance(event, StopTrials):
            self.stopping = True
            self._log(f"stopping: {event.reason}")
        elif isinstance(event, Ended) and event.trial in self.running:
            self._fill_again_at = 0.0
            self._trial_ended(self.running.pop(event.trial), event)

    def _check_running(self) -> None:
        """Read new metrics, check the budget and other workers, and draw a trial ahead."""
        for trial in self.running.values():
            self._read_metrics(trial)
        self.queue.look_for_dead()
        if used_up := self.allowance.is_used_up(self.running.values()):
            for trial in self.running.values():
                trial.over_budget = trial.over_budget or not trial.stop_reason
                self._end_early(trial, used_up)
        if self.running and len(self.running) == self.slots and not self.stopping and not self._refuses_new():
            self.queue.draw_ahead()

    def _waits(self, end: Nothing) -> bool:
        """Whether to wait because another process may soon release a trial of this worker."""
        return self.queue.foreign.is_worth_waiting() and not end.then and not self._refuses_any()

    # -- starting trials ------------------------------------------------------------------------------------------

    def _fill(self) -> Nothing | None:
        """Start trials in all free slots.

        Returns why a slot stays empty; None if no slot does, if the worker is stopping, or if a search is not yet due.
        """
        if (self.running or self.queue.foreign) and time.monotonic() < self._fill_again_at:
            return None
        while len(self.running) < self.slots and not self.stopping:
            found = self._next()
            if isinstance(found, Nothing):
                self._fill_again_at = self.queue.foreign.look_again_at(time.monotonic() + PAUSE_SECONDS)
                return found
            self._start(found)
        return None

    def _next(self) -> int | Impossible | Nothing:
        if why := self._refuses_any():
            return Nothing(why=why)
        begun = self.queue.begun(self.running)
        if begun is None and (why := self._refuses_new()):
            return Nothing(why=why, then="requeue" if self.allowance.is_short_of_time() else "")
        found = begun if begun is not None else self.queue.new()
        if isinstance(found, Nothing):
            begun = self.queue.orphan(self.running, at_once=True)
            found = found if begun is None else begun
        return self.queue.write(found) if isinstance(found, int) else found

    def _refuses_any(self) -> str:
        """Why no trial may start, not even one that has begun; empty if one may."""
        self.notes.read()
        return self.notes.halted or self._disk_error or self.allowance.is_used_up()

    def _refuses_new(self) -> str:
        """Why no new trial may begin; empty if one may."""
        return self._refuses_any() or self.allowance.against_another()

    def _start(self, found: int | Impossible) -> None:
        if isinstance(found, Impossible):
            self._record(found.number, TrialOutcome(state="failed", why=found.why, error_class="spec"), {}, None)
            return
        slot = min(set(range(self.slots)) - {trial.slot for trial in self.running.values()})
        trial = self._watch(found, slot)
        self.worker.run(found, slot=slot)
        params = ", ".join(f"{name}={value}" for name, value in self.record.trials[found].params.items())
        self._log(f"trial {found}: {'starts' if trial.is_new else 'continues'} ({params})")

    def _watch(self, number: int, slot: int) -> RunningTrial:
        trial = RunningTrial(self.sweep.trial(number), number, slot=slot, metrics=self.section.metrics)
        trial.read_stop_request()
        trial.reported = self.record.trials[number].step or 0
        self.running[number] = trial
        return trial

    def _adopt(self, number: int, slot: int) -> None:
        """Claim and track a running trial that was started by the previous tuner, which has died."""
        self.queue.claim(number)
        self._watch(number, slot)
        self._log(f"trial {number}: was already running in slot {slot}")

    # -- running trials -------------------------------------------------------------------------------------------

    def _read_metrics(self, trial: RunningTrial) -> None:
        for step, values in trial.follower.read():
            if self.rule is None or trial.stop_reason:
                continue
            if self.rule.wants(trial.number, step, after=trial.reported):
                trial.reported = step
                self._compare(trial, step, values[self.section.metrics[0]])

    def _compare(self, trial: RunningTrial, step: int, value: float) -> None:
        """Report the metric of a trial that has reached a rung, and apply the pruning rule to the trial."""
        why = self.study.report(trial.number, step, value)
        extended = is_extended(self.record.trials[trial.number].user_attrs)
        if why and not extended and not self.stopping:
            self._end_early(trial, why)
        else:
            self._log(f"trial {trial.number}: continues at step {step}, {self.section.metrics[0]}={value:g}")

    def _end_early(self, trial: RunningTrial, why: str) -> None:
        if not trial.stop_reason:
            self._log(f"trial {trial.number}: requested to stop at step {trial.follower.step}: {why}")
            trial.request_stop(why)

    # -- ended trials ---------------------------------------------------------------------------------------------

    def _trial_ended(self, trial: RunningTrial, ended: Ended) -> None:
        self._read_metrics(trial)
        number, spent = trial.number, trial.spent()
        if ended.error_class not in ("busy", "disk"):
            self.queue.foreign.reset_wait()
        outcome = self._counts.decide(trial, ended, failures=spent.failures, stopping=self.stopping)
        self.notes.read()
        if self.record.trials[number].is_finished or not self.queue.is_ours(number):
            self._log(f"trial {number}: another tuner has claimed or recorded it (worker {self.notes.owner(number)})")
            self.queue.left.add(number)
        elif outcome.state == "again":
            self._log(f"trial {number}: restarts ({outcome.why})")
            self.queue.restarts.append(number)
        elif outcome.state == "left":
            self._leave(number, outcome, ended)
        else:
            self.allowance.learn(trial)
            self._record(
                number,
                outcome,
                trial.end_attributes(spent, share=self.allowance.share, complete=outcome.state == "complete"),
                trial.follower.last.get(self.section.metrics[0]),
            )

    def _leave(self, number: int, outcome: TrialOutcome, ended: Ended) -> None:
        """Keep a trial unfinished, to be continued later by this tuner or by a worker that starts later."""
        if ended.error_class == "busy" and not self.stopping:
            self._log(f"trial {number}: will be retried soon ({outcome.why})")
            self.queue.foreign.add(number)
            return
        self._log(f"trial {number}: will continue later ({outcome.why or ended.reason})")
        self.queue.left.add(number)
        if ended.error_class == "disk":
            self._disk_error = (
                f"trial {number}: {outcome.why}. Free some space or make the directory writable, then run: "
                f"hpcaccel sweep resume {self.sweep.run_id}"
            )

    def _record(
        self, number: int, outcome: TrialOutcome, attributes: Mapping[str, object], last: tuple[int, float] | None
    ) -> None:
        """Record the end of a trial in the study. ``last``: the last logged step and value of the first metric."""
        record_outcome(self.study, number, outcome, attributes, last=last)
        self.notes.read()
        text = describe_outcome(outcome, self.record.trials, self.goal)
        self._log(f"trial {number}: {text}; used so far: {in_hours(self.allowance.spent())}")
        self.cleanup.add(number)
        if outcome.state == "failed" and (why := hopeless(self.record.trials, since=self.notes.resumed)):
            self._halt_sweep(why)
        if outcome.error_class == BUDGET and not self.allowance.is_used_up():  # the budget was raised
            queue_again(self.sweep, self.study, self.record.trials[number], origin="budget")

    def _halt_sweep(self, why: str) -> None:
        if not self.notes.halted:
            self.queue.halt_sweep(why)
            self._log(f"the sweep is stopping: {why}")

    def _log(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
