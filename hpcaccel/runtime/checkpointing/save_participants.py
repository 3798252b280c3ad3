"""Determines which ranks take part in a save or load of the script: all ranks, or only those that make the call.

Many tutorials save under ``if accelerator.is_main_process``. A collective there would wait for ranks that never make
the call. Therefore the ranks first exchange their calls through the store: each rank writes its call, and rank 0 waits
for a limited time, selects the participants, and writes its decision. A rank that calls too late reads that rank 0 has
continued without it. No collective starts before all of its ranks are certain to join, so all ranks use the control
group in the same order.

The exchange for one call on rank 0 is a *meeting*; meetings are numbered.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.call_site import call_stack
from hpcaccel.runtime.distributed.process_group import RankGroup

__all__ = ["CollectiveCall", "ParticipantTable", "SaveParticipants", "attend", "participants_of"]

FIRST_PAUSE_SECONDS = 0.001
LONGEST_PAUSE_SECONDS = 0.05
WARN_AFTER_SECONDS = 60.0
MAX_PAST_CALLS = 32
"""Number of incomplete meetings that rank 0 stores for ranks that call too late."""


class CollectiveCall(NamedTuple):
    """A collective save or load call: kind, directory, step and call site."""

    kind: str
    """The name of the call, such as ``save_state()``."""
    where: str
    """The directory that the script passed; empty if it passed none."""
    step: int
    stack: list[str]

    @property
    def site(self) -> str:
        return self.stack[0] if self.stack else "an unknown line"

    def is_same(self, other: CollectiveCall) -> bool:
        """Whether both ranks have made the same call. Calls from the same line at the same step may have different
        directories, whose names may contain the time; rank 0's directory is used."""
        same_line = (self.stack, self.step) == (other.stack, other.step)
        return self.kind == other.kind and (self.where == other.where or same_line)

    def is_late_for(self, past: CollectiveCall) -> bool:
        """Whether this call belongs to the meeting for the call ``past``, which ended without this rank."""
        return self.is_same(past) and (self.step == past.step or self.stack == past.stack)


class ParticipantTable(NamedTuple):
    """The result of a meeting: which ranks take part."""

    meeting: int
    missing: list[int]
    where: str
    """The directory that rank 0 passed; for a rank that called too late, the directory that this rank passed."""

    @property
    def complete(self) -> bool:
        return not self.missing


class SaveParticipants:
    """The meetings of one group of ranks. In each, rank 0 decides which ranks take part."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._store: Any = group.store
        self._rank = group.rank
        self._others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._calls = dict.fromkeys(range(group.world_size), 0)
        """Number of calls made by each rank. Only rank 0 counts the calls of other ranks."""
        self._settled = dict.fromkeys(range(group.world_size), 0)
        """For each rank, the last meeting that it took part in or was too late for."""
        self._meetings = 0
        self._past: list[tuple[int, CollectiveCall]] = []
        self._unattended: set[tuple[str, ...]] = set()
        """Call sites at which, the last time, only rank 0 made the call."""

    def attend(self, call: CollectiveCall, *, needs_all: bool, patience: float, limit: float) -> ParticipantTable:
        """Determine which ranks make the same call.

        Args:
            needs_all: whether a missing rank is an error.
            patience: maximum seconds that rank 0 waits for the other ranks.
            limit: maximum seconds that the other ranks wait for rank 0.

        Raises:
            RuntimeMisuse: rank 0 is missing, or ``needs_all`` is true and another rank is missing.
        """
        if self._rank == 0:
            return self._lead(call, needs_all=needs_all, patience=patience)
        return self._follow(call, limit=limit)

    def report(self, meeting: int, *, done: str = "", problem: str = "") -> None:
        """On rank 0, write the result of its save for the other ranks of an incomplete meeting."""
        self._store.set(f"attend/result/{meeting}", json.dumps([done, problem]))

    def result(self, meeting: int, *, limit: float) -> str:
        """On ranks other than 0, wait for the result of rank 0's save in an incomplete meeting, and return it.

        Args:
            limit: maximum seconds to wait.

        Raises:
            CheckpointError: rank 0's save failed, or there is no result within the limit.
        """
        key = f"attend/result/{meeting}"
        if not self._wait(lambda: self._store.check([key]), limit):
            raise CheckpointError(f"rank 0 did not report the result of its save within {limit:.0f} s")
        done, problem = json.loads(self._store.get(key))
        if problem:
            raise CheckpointError(f"{problem} (on rank 0)")
        return str(done)

    # -- rank 0

    def _lead(self, call: CollectiveCall, *, needs_all: bool, patience: float) -> ParticipantTable:
        if tuple(call.stack) in self._unattended and not needs_all:
            patience /= 5
        here, elsewhere = self._collect_calls(call, patience)
        missing = [rank for rank in self._others if rank not in here]
        self._meetings += 1
        problem = _missing_text(call, missing, elsewhere, patience) if missing and needs_all else ""
        self._close(call, here, missing, problem)
        if problem:
            self._give_up(problem)
        if missing and not here:
            self._unattended.add(tuple(call.stack))
        return ParticipantTable(self._meetings, missing, call.where)

    def _collect_calls(self, call: CollectiveCall, patience: float) -> tuple[list[int], dict[int, CollectiveCall]]:
        """Wait up to ``patience`` seconds for the other ranks. Returns the ranks that have made this call, and the
        calls of the ranks that wait in another call."""
        here: list[int] = []
        elsewhere: dict[int, CollectiveCall] = {}

        def all_called() -> bool:
            here.clear()
            elsewhere.clear()
            for rank in self._others:
                current = self._current_call(rank)
                if current is not None and current.is_same(call):
                    here.append(rank)
                elif current is not None:
                    elsewhere[rank] = current
            return len(here) + len(elsewhere) == len(self._others)

        self._wait(all_called, patience)
        return here, elsewhere

    def _current_call(self, rank: int) -> CollectiveCall | None:
        """The call in which ``rank`` is waiting; None if it is in no call. Calls made too late are skipped."""
        while self._store.check([self._key(rank)]):
            call = _read(self._store.get(self._key(rank)))
            late = self._too_late(rank, call, self._past)
            if late is None:
                return call
            self._unattended.discard(tuple(call.stack))
            self._settle(rank, late)
        return None

    def _close(self, call: CollectiveCall, here: list[int], missing: list[int], problem: str) -> None:
        if missing and not problem:
            self._past = [*self._past, (self._meetings, call)][-MAX_PAST_CALLS:]
            self._store.set("attend/past", json.dumps(self._past))
        for rank in here:
            self._store.set(f"{self._key(rank)}/decision", json.dumps([self._meetings, missing, call.where, problem]))
            self._settle(rank, self._meetings)

    # -- ranks other than 0

    def _follow(self, call: CollectiveCall, *, limit: float) -> ParticipantTable:
        key = self._key(self._rank)
        self._store.set(key, json.dumps(call))
        late: int | None = None

        def decided() -> bool:
            nonlocal late
            if self._store.check([f"{key}/decision"]):
                return True
            if self._store.check(["attend/past"]):
                past = [(number, CollectiveCall(*item)) for number, item in json.loads(self._store.get("attend/past"))]
                late = self._too_late(self._rank, call, past)
            return late is not None

        if limit > WARN_AFTER_SECONDS and not self._wait(decided, WARN_AFTER_SECONDS):
            waiting = f"rank {self._rank} is waiting for rank 0 in {call.kind} at {call.site}"
            print(f"hpcaccel: {waiting}", file=sys.stderr)
            limit -= WARN_AFTER_SECONDS
        if not self._wait(decided, limit):
            self._store.delete_key(key)  # otherwise rank 0 would include this rank
            self._give_up(_missing_text(call, [0], {}, limit))
        if late is not None:
            self._settle(self._rank, late)
            return ParticipantTable(late, [self._rank], call.where)
        meeting, missing, where, problem = json.loads(self._store.get(f"{key}/decision"))
        self._store.delete_key(f"{key}/decision")
        self._settle(self._rank, meeting)
        if problem:
            raise RuntimeMisuse(problem)
        return ParticipantTable(meeting, missing, where)

    # -- all ranks

    def _give_up(self, text: str) -> NoReturn:
        if self._group.exchange is not None:
            self._group.exchange.watchdog.abort(text)
        raise RuntimeMisuse(text)

    def _key(self, rank: int) -> str:
        return f"attend/{rank}/{self._calls[rank]}"

    def _too_late(self, rank: int, call: CollectiveCall, past: list[tuple[int, CollectiveCall]]) -> int | None:
        return next((number for number, item in past if number > self._settled[rank] and call.is_late_for(item)), None)

    def _settle(self, rank: int, meeting: int) -> None:
        if rank != self._rank:
            self._store.delete_key(self._key(rank))
        self._calls[rank] += 1
        self._settled[rank] = meeting

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``condition()`` is true. Returns False if that takes longer than ``seconds``. The condition is
        checked at least once."""
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True


def _read(text: bytes) -> CollectiveCall:
    return CollectiveCall(*json.loads(text))


def _missing_text(
    call: CollectiveCall, missing: list[int], elsewhere: dict[int, CollectiveCall], seconds: float
) -> str:
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    others = "".join(f"; rank {rank} is waiting in {item.kind} at {item.site}" for rank, item in elsewhere.items())
    return (
        f"{call.kind} at {call.site}: {names} did not reach this call within {seconds:.0f} s{others}. All ranks must "
        "make it: move it out of conditions that only some ranks meet, such as `if accelerator.is_main_process:`"
    )


_latest: tuple[Any, SaveParticipants] | None = None


def participants_of(group: RankGroup) -> SaveParticipants:
    """The meetings of this group of ranks. There is one object per process, replaced if the group has a new store."""
    global _latest
    if _latest is None or _latest[0] is not group.store:
        _latest = (group.store, SaveParticipants(group))
    return _latest[1]


def attend(
    group: RankGroup, kind: str, *, where: str = "", step: int = 0, needs_all: bool, patience: float, limit: float
) -> ParticipantTable:
    """Determine which ranks make the script's current call; see ``SaveParticipants.attend``."""
    if group.store is None:
        return ParticipantTable(0, [], where)
    call = CollectiveCall(kind, where, step, call_stack())
    return participants_of(group).attend(call, needs_all=needs_all, patience=patience, limit=limit)
