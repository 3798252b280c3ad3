"""The chooser of a sweep's worker: which trial runs next, when one ends early, what the study is told.

``python -m hpcaccel.sweeps.tuner SWEEP_DIR INDEX``, a child of the worker's host
(``hpcaccel.node.sweep.sweep_worker``), with which it exchanges JSON lines over standard input and output; what it
prints to standard error stands in the worker's log. It may be killed at any moment: what it knows is in the journal and
in the trials' directories, and the next one goes on there.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from hpcaccel.core.run_dir import SweepDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.sweeps import results
from hpcaccel.sweeps.allowance import Allowance
from hpcaccel.sweeps.budget import in_hours
from hpcaccel.sweeps.deferred_cleanup import Chores
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.foreign_writers import Busy
from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.journal_reader import StudyRecord
from hpcaccel.sweeps.next_trial import Choosing, Impossible, Nothing
from hpcaccel.sweeps.ownership import Notes
from hpcaccel.sweeps.pruning import rule_of
from hpcaccel.sweeps.retry import queue_again
from hpcaccel.sweeps.running_trial import Course
from hpcaccel.sweeps.trial_attrs import is_extended
from hpcaccel.sweeps.trial_result import BUDGET, Verdict, hopeless, in_words, judge, write_down
from hpcaccel.sweeps.tuner_protocol import Ended, Event, Hello, Host, HostGone, Stopping, take_over_stdout

if TYPE_CHECKING:
    from hpcaccel.sweeps.study import SweepStudy

__all__ = ["Worker", "main"]

LOOK_SECONDS = 0.5
"""So often trials are looked at; what the host says is heard at once."""
PAUSE_SECONDS = 30.0
"""A place for which there is no trial stays empty for so long, unless one ends in another."""


def main(argv: Sequence[str] | None = None) -> None:
    directory, index = sys.argv[1:] if argv is None else argv
    host = Host(0, take_over_stdout())
    try:
        hello = host.welcome()
        Worker(SweepDir(directory), int(index), hello, host).work()
    except HostGone:
        sys.exit(0)
    except HpcaccelError as error:
        print(f"hpcaccel: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


class Worker:
    """One start of a chooser.

    Raises:
        RunDirectoryError: it is no sweep's directory, or cannot be written any more. What was told before stands, and
            trials that run stay this worker's.
    """

    def __init__(self, sweep: SweepDir, index: int, hello: Hello, host: Host, *, slurm: Slurm | None = None) -> None:
        self.sweep = sweep
        self.index = index
        self.host = host
        self.slots = hello.slots
        self.definition = definition = read_definition(sweep)
        self.section = definition.spec.sweep
        self.goal = results.Goal.of(self.section.model_dump(mode="json"))
        self.rule = rule_of(self.section)
        self.journal = JournalFile(sweep.journal)
        self.record = StudyRecord(sweep.journal)
        self.notes = Notes(self.record)
        self.allowance = Allowance(sweep, definition, hello, record=self.record)
        self.choosing = Choosing(
            sweep,
            worker=index,
            token=f"{hello.job_id}.{hello.restart_count}.{os.getpid()}",
            definition=definition,
            study=lambda: self.study,
            journal=self.journal,
            record=self.record,
            notes=self.notes,
            account=self.allowance.account,
            slurm=slurm,
        )
        self.chores = Chores(sweep, keep=self.section.keep_checkpoints, goal=self.goal, record=self.record)
        self.courses: dict[int, Course] = {}
        """Trials in flight, by number."""
        self.stopping = False
        self._again: list[int] = []
        self._left: set[int] = set()
        """Trials that are not for this start of the worker, though nobody has ended them."""
        self._busy = Busy(lambda number: not self.record.trials[number].is_finished and self.choosing.is_ours(number))
        self._unwritable = ""
        """What is wrong with the disk, where a trial could not be started for it."""
        self._ask_again_at = 0.0
        self._failures: Counter[int] = Counter()
        self._interruptions: Counter[int] = Counter()
        self.chores.catch_up(index, self.notes.read())
        for slot, number in hello.running.items():
            self._take_over(number, int(slot))

    @cached_property
    def study(self) -> SweepStudy:
        """Optuna's view, opened when it is first needed."""
        from hpcaccel.sweeps.study import SweepStudy

        return SweepStudy.of(self.sweep, self.definition.spec)

    # -- the whole ------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Until there is nothing more to do for this worker, or the host has gone (``HostGone``)."""
        while True:
            end = self._fill()
            for problem in self.chores.do():
                self._say(problem)
            if end is not None and not self.courses and not self._waits(end):
                self._say(f"nothing more to do here: {end.why}")
                self.host.end(end.why, then=end.then)
                return
            for event in self.host.hear(LOOK_SECONDS):
                self._hear(event)
            self._look()

    def _hear(self, event: Event) -> None:
        if isinstance(event, Stopping):
            self.stopping = True
            self._say(f"stopping: {event.reason}")
        elif isinstance(event, Ended) and event.trial in self.courses:
            self._ask_again_at = 0.0
            self._has_ended(self.courses.pop(event.trial), event)

    def _look(self) -> None:
        """What is to be looked at while trials run."""
        for course in self.courses.values():
            self._follow(course)
        self.choosing.look_for_dead()
        if over := self.allowance.is_used_up(self.courses.values()):
            for course in self.courses.values():
                course.over_budget = course.over_budget or not course.asked
                self._end_early(course, over)
        if self.courses and len(self.courses) == self.slots and not self.stopping and not self._why_no_other():
            self.choosing.draw_ahead()

    def _waits(self, end: Nothing) -> bool:
        """Whether somebody else will soon let go of a trial, so that there is something to do after all."""
        return self._busy.is_worth_waiting() and not end.then and not self._why_none()

    # -- beginning ------------------------------------------------------------------------------------------------

    def _fill(self) -> Nothing | None:
        """Start trials until there is place for no other; why it remains, where it does."""
        if (self.courses or self._busy) and time.monotonic() < self._ask_again_at:
            return None
        while len(self.courses) < self.slots and not self.stopping:
            found = self._next()
            if isinstance(found, Nothing):
                self._ask_again_at = self._busy.look_again_at(time.monotonic() + PAUSE_SECONDS)
                return found
            self._start(found)
        return None

    def _next(self) -> int | Impossible | Nothing:
        busy = {*self.courses, *self._left, *self._busy.not_yet()}
        if why := self._why_none():
            return Nothing(why=why)
        begun = self._again.pop() if self._again else self.choosing.unfinished(busy)
        begun = self.choosing.orphan(busy) if begun is None else begun
        if begun is None and (why := self._why_no_other()):
            return Nothing(why=why, then="requeue" if self.allowance.is_short_of_time() else "")
        found = begun if begun is not None else self.choosing.new()
        if isinstance(found, Nothing):
            begun = self.choosing.orphan(busy, at_once=True)
            found = found if begun is None else begun
        return self.choosing.write(found) if isinstance(found, int) else found

    def _why_none(self) -> str:
        """Why nothing may start, not even what was begun before."""
        self.notes.read()
        return self.notes.halted or self._unwritable or self.allowance.is_used_up()

    def _why_no_other(self) -> str:
        """Why no new trial may begin; empty where one may."""
        return self._why_none() or self.allowance.against_another()

    def _start(self, found: int | Impossible) -> None:
        if isinstance(found, Impossible):
            self._tell(found.number, Verdict(state="failed", why=found.why, error_class="spec"))
            return
        slot = min(set(range(self.slots)) - {course.slot for course in self.courses.values()})
        course = self._watch(found, slot)
        self.host.run(found, slot=slot)
        params = ", ".join(f"{name}={value}" for name, value in self.record.trials[found].params.items())
        self._say(f"trial {found}: {'starts' if course.is_new else 'goes on'} ({params})")

    def _watch(self, number: int, slot: int) -> Course:
        course = Course(self.sweep.trial(number), number, slot=slot, metrics=self.section.metrics)
        course.remember()
        course.reported = self.record.trials[number].step or 0
        self.courses[number] = course
        return course

    def _take_over(self, number: int, slot: int) -> None:
        """A trial that runs already: the chooser before this one has died."""
        self.choosing.claim(number)
        self._watch(number, slot)
        self._say(f"trial {number}: runs in place {slot}; following it from here")

    # -- on the way -----------------------------------------------------------------------------------------------

    def _follow(self, course: Course) -> None:
        for step, values in course.follower.read():
            if self.rule is None or course.asked or not self.rule.wants(course.number, step, after=course.reported):
                continue
            course.reported = step
            self._has_reached(course, step, values[self.section.metrics[0]])

    def _has_reached(self, course: Course, step: int, value: float) -> None:
        """A trial has come to a rung."""
        why = self.study.report(course.number, step, value)
        extended = is_extended(self.record.trials[course.number].user_attrs)
        if why and not extended and not self.stopping:
            self._end_early(course, why)
        else:
            self._say(f"trial {course.number}: goes on at step {step}, {self.section.metrics[0]}={value:g}")

    def _end_early(self, course: Course, why: str) -> None:
        if not course.asked:
            self._say(f"trial {course.number}: to end at step {course.follower.step}: {why}")
            course.ask_to_end(why)

    # -- its end --------------------------------------------------------------------------------------------------

    def _has_ended(self, course: Course, ended: Ended) -> None:
        self._follow(course)
        number, spent = course.number, course.spent()
        if ended.error_class not in ("busy", "disk"):
            self._busy.something_was_done()
            self._failures[number] += ended.reason == "failed" and ended.decision == "end"
        self._interruptions[number] += ended.decision == "requeue"
        verdict = judge(
            ended,
            values=course.values,
            never_logged=course.follower.never_logged,
            asked=course.asked,
            over_budget=course.over_budget,
            failures=max(spent.failures, self._failures[number]),
            interruptions=self._interruptions[number],
            retries=self.section.retries,
            stopping=self.stopping,
        )
        self.notes.read()
        if self.record.trials[number].is_finished or not self.choosing.is_ours(number):
            self._say(f"trial {number}: worker {self.notes.owner(number)} has taken it over")
            self._left.add(number)
        elif verdict.state == "again":
            self._say(f"trial {number}: once more, after {verdict.why}")
            self._again.append(number)
        elif verdict.state == "left" and ended.error_class == "busy" and not self.stopping:
            self._say(f"trial {number}: to be looked at again soon ({verdict.why})")
            self._busy.add(number)
        elif verdict.state == "left":
            self._say(f"trial {number}: to be continued ({verdict.why or ended.reason})")
            self._left.add(number)
            if ended.error_class == "disk":
                self._unwritable = (
                    f"trial {number}: {verdict.why}. Make room, or make it writable, then go on: "
                    f"hpcaccel sweep resume {self.sweep.run_id}"
                )
        else:
            self.allowance.learn(course)
            steps, _ = course.steps()
            cost = spent.seconds * self.allowance.share
            marks = {results.GPU_SECONDS: round(cost, 3), results.STEPS: steps, results.ATTEMPTS: spent.attempts}
            last = course.follower.last.get(self.section.metrics[0])
            if last is not None and verdict.state == "complete":
                marks[results.VALUE_STEP] = last[0]
            self._tell(number, verdict, marks, last=last)

    def _tell(
        self,
        number: int,
        verdict: Verdict,
        marks: Mapping[str, object] | None = None,
        *,
        last: tuple[int, float] | None = None,
    ) -> None:
        """Args:
        last: the last step of the first metric, and its value.
        """
        write_down(self.study, number, verdict, marks or {}, last=last)
        self.notes.read()
        news = in_words(verdict, self.record.trials, self.goal)
        self._say(f"trial {number}: {news}; spent: {in_hours(self.allowance.spent())}")
        self.chores.add(number)
        if verdict.state == "failed":
            self._halt_where_hopeless()
        if verdict.error_class == BUDGET and not self.allowance.is_used_up():
            # It was told only now, under a larger budget.
            queue_again(self.sweep, self.study, self.record.trials[number], origin="budget")

    def _halt_where_hopeless(self) -> None:
        why = hopeless(self.record.trials, since=self.notes.resumed)
        if why and not self.notes.halted:
            self.journal.append([{"hpcaccel": "halt", "why": why, "time": time.time()}], sync=True)
            self._say(f"the sweep stops: {why}")

    # -- signs of life --------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
