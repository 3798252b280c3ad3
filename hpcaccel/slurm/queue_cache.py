"""Few questions: one squeue for all jobs of the user, asked seldom, and shared between all processes.

Whoever wants to know about a job looks here. An answer serves everybody for a minute (``HPCACCEL_QUEUE_SECONDS``); of
those who find it too old one asks, and the others wait for what it hears. Who has changed something sees an answer that
came after the change.

A job that squeue does not list is not gone: squeue may have failed, or have been asked of a controller that has just
started. Then sacct is asked once for all such jobs, and scontrol for those that it cannot tell of. Gone is what Slurm
says of that very job: an end in the accounting, or that there is no such job, although it remembers each for
``MinJobAge`` (slurm.conf(5)) after its end. Anything else stays unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcaccel.errors import HpcaccelError, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.queue_cache_file import Memory, Shelf
from hpcaccel.slurm.queue_cache_lock import turn
from hpcaccel.slurm.queue_cache_path import Place, shared_place
from hpcaccel.slurm.queue_lookup import look_up
from hpcaccel.slurm.states import JobState

__all__ = ["SECONDS_VARIABLE", "Answer", "Known", "Queue"]

SECONDS_VARIABLE = "HPCACCEL_QUEUE_SECONDS"
DEFAULT_SECONDS = 60.0
PAUSE_SECONDS = 2.0
"""So long at least lies between two questions, however often something changes."""
ANSWER_SECONDS = 20.0
"""After that a question counts as unanswered."""
PATIENCE_SECONDS = 10.0
"""So long we wait for what somebody else has asked, where there is an older answer to show meanwhile."""
LONGEST_SECONDS = 90.0
"""The same where there is none."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of one job."""

    state: JobState = JobState.UNKNOWN
    reason: str = ""
    """Why it waits, or why it ended, in Slurm's word."""
    gone: bool = False
    """Slurm has no such job any more; it never says how it ended."""
    at: float = 0.0
    """When Slurm said so, in seconds since the epoch."""
    words: str = ""
    """Where the state is UNKNOWN: why, for people."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is known of the jobs that were asked about: each of them has an entry."""

    jobs: dict[str, Known]
    asked: float
    """When the squeue was begun that it comes from, in seconds since the epoch; 0.0: none was answered yet."""
    note: str = ""
    """Why it is not newer, for people; empty where it is as new as was asked for."""


class Queue:
    """Args:
    slurm: asks; one that does not stand for this machine's own Slurm shares nothing with other processes.
    seconds: how long an answer serves. Default: ``HPCACCEL_QUEUE_SECONDS``, or a minute.
    place: where the answer is shared. Default: in the user's state folder.

    Raises:
        UserError: the variable holds no number of seconds.
    """

    def __init__(self, slurm: Slurm | None = None, *, seconds: float | None = None, place: Place | None = None) -> None:
        self._slurm = slurm or Slurm(timeout_seconds=ANSWER_SECONDS)
        self._place = place or (shared_place() if self._slurm.is_here else None)
        self._shelf = Shelf(self._place.answer if self._place is not None else None)
        if seconds is None:
            seconds = _chosen_seconds() if self._slurm.is_here else 0.0
        self._seconds = seconds

    def look(
        self, job_ids: Iterable[str], *, after: float | None = None, submitted: Mapping[str, float] | None = None
    ) -> Answer:
        """What is known of these jobs, from an answer that is fresh enough, or from a new one.

        Slurm that does not answer is no error: the last answer is shown then, with a note.

        Args:
            after: seconds since the epoch; an answer counts only if it was asked for later. Default: since the last
                change that a command of this user has made. 0.0: whatever is not too old (for those who look often).
            submitted: when each job was submitted at the latest. A job is not gone before it can have been forgotten.
        """
        wanted = dict.fromkeys(job_ids, 0.0) | dict(submitted or {})
        if not wanted:
            return Answer(jobs={}, asked=0.0)
        memory = self._shelf.read()
        since = self._since(memory, wanted) if after is None else after
        waits_for_somebody = False
        if not self._serves(memory, wanted, since):
            memory, waits_for_somebody = self._in_turn(wanted, since, memory)
        return _answer(memory, wanted, waits_for_somebody)

    def questions(self) -> dict[str, int]:
        """How often each of Slurm's programs was asked so far, by all processes together."""
        return dict(self._shelf.read().questions)

    # -- is it fresh enough? --------------------------------------------------------------------------------------

    def _since(self, memory: Memory, wanted: Mapping[str, float]) -> float:
        changed = self._place.changed() if self._place is not None else 0.0
        unheard = [one for one in wanted if one not in memory.jobs]
        new = [wanted[one] for one in unheard if memory.finding(one, submitted=wanted[one]) is None]
        return max([changed, *new])

    def _serves(self, memory: Memory, wanted: Mapping[str, float], since: float) -> bool:
        if not self._is_fresh(memory.tried, since):
            return False
        return bool(memory.failure) or not self._missing(memory, wanted, since)

    def _is_fresh(self, asked: float, since: float) -> bool:
        # Login nodes share a home and not quite a clock.
        return asked > since and abs(time.time() - asked) < self._seconds

    def _missing(self, memory: Memory, wanted: Mapping[str, float], since: float) -> list[str]:
        """Jobs that squeue does not list, and that must be asked for one by one."""
        missing = []
        for one, submitted in wanted.items():
            if one in memory.jobs or submitted >= memory.asked:
                continue  # what is later than that answer will be in the next one
            found = memory.finding(one, submitted=submitted)
            if found is None or not (found.settled or self._is_fresh(found.at, since)):
                missing.append(one)
        return missing

    # -- asking ---------------------------------------------------------------------------------------------------

    def _in_turn(self, wanted: Mapping[str, float], since: float, memory: Memory) -> tuple[Memory, bool]:
        """What is known afterwards, and whether we have given up waiting for somebody who asks."""
        if self._place is None:
            self._ask(memory, wanted, since)
            return memory, False
        patience = PATIENCE_SECONDS if memory.asked else LONGEST_SECONDS

        def answered() -> bool:
            return self._serves(self._shelf.read(), wanted, since)

        with turn(self._place.lock, answered=answered, patience_seconds=patience) as ours:
            memory = self._shelf.read()
            serves = self._serves(memory, wanted, since)
            if ours and not serves:
                self._pause(memory)
                self._ask(memory, wanted, since)
                self._shelf.write(memory)
        return memory, not ours and not serves

    def _pause(self, memory: Memory) -> None:
        rest = min(PAUSE_SECONDS, self._seconds) - abs(time.time() - memory.tried)
        if rest > 0:
            time.sleep(rest)

    def _ask(self, memory: Memory, wanted: Mapping[str, float], since: float) -> None:
        self._remember(memory, wanted)
        if not self._is_fresh(memory.tried, since):
            self._ask_squeue(memory)
        if memory.failure:
            return
        everybodys = {one: submitted for one, (_, submitted) in memory.wanted.items()}
        if missing := self._missing(memory, everybodys, since):
            look_up(self._slurm, memory, missing, pause_seconds=self._seconds)

    def _remember(self, memory: Memory, wanted: Mapping[str, float]) -> None:
        """Who asks next asks for all those as well whom others have asked about lately."""
        now = time.time()
        lately = {one: told for one, told in memory.wanted.items() if now - told[0] < 2 * self._seconds}
        memory.wanted = lately | {one: (now, submitted) for one, submitted in wanted.items()}

    def _ask_squeue(self, memory: Memory) -> None:
        began = time.time()
        memory.count("squeue")
        try:
            memory.take(self._slurm.queue(None, include_ended=True), asked=began)
        except HpcaccelError as error:
            memory.tried, memory.failure = began, str(error)


def _chosen_seconds() -> float:
    text = os.environ.get(SECONDS_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise UserError(
            f"{SECONDS_VARIABLE}={text!r} is no number of seconds (0 to 86400; without it {DEFAULT_SECONDS:g})"
        )
    return seconds


# -- what is told -----------------------------------------------------------------------------------------------------


def _answer(memory: Memory, wanted: Mapping[str, float], waits_for_somebody: bool) -> Answer:
    note = f"Slurm does not answer: {memory.failure}" if memory.failure else ""
    if waits_for_somebody:
        note = "Slurm has been asked and has not answered yet"
    jobs = {one: _known(memory, one, submitted, note) for one, submitted in wanted.items()}
    return Answer(jobs=jobs, asked=memory.asked, note=note)


def _known(memory: Memory, job_id: str, submitted: float, note: str) -> Known:
    if (entry := memory.jobs.get(job_id)) is not None and entry.state is not JobState.UNKNOWN:
        return Known(state=entry.state, reason=entry.reason, at=memory.asked)
    found = memory.finding(job_id, submitted=submitted)
    if found is not None and (found.forgotten or found.state is not JobState.UNKNOWN):
        return Known(state=found.state, reason=found.reason, gone=found.forgotten, at=found.at)
    if entry is not None:
        return Known(words="Slurm names a state that is not known here", at=memory.asked)
    seen = memory.seen.get(job_id)
    last = "" if seen is None or seen.at <= submitted else f"; last seen {seen.state.value} at {_clock(seen.at)}"
    why = note or (found.reason if found is not None else "") or "Slurm has not been asked since it was submitted"
    return Known(words=why + last)


def _clock(when: float) -> str:
    """Of the day where it is this one. No age: it would be another word at each look."""
    today = time.strftime("%F") == time.strftime("%F", time.localtime(when))
    return time.strftime("%H:%M:%S" if today else "%F %H:%M", time.localtime(when))
