"""Who takes part in a save or a load that the script calls: all ranks, or only those that came.

Widely read tutorials save under ``if accelerator.is_main_process``. A collective would wait there for ranks that never
come. So the ranks meet in the store first: each says that it has come and to what, rank 0 waits a bounded time and
tells them who takes part. A rank that comes too late finds out that it was done without it. No collective is issued
before it is clear that everybody will issue it, so the order of those on the control group stays the same everywhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.call_site import call_stack
from hpcaccel.runtime.distributed.process_group import Group

__all__ = ["Attendance", "Call", "Quorum", "attend", "of"]

FIRST_PAUSE_SECONDS = 0.001
LONGEST_PAUSE_SECONDS = 0.05
WARN_AFTER_SECONDS = 60.0
REMEMBERED = 32
"""Meetings that rank 0 keeps in mind for those who come too late."""


class Call(NamedTuple):
    """What a rank has come to."""

    kind: str
    """As the script calls it: ``save_state()``."""
    where: str
    """The directory that the script named, or nothing."""
    step: int
    stack: list[str]

    @property
    def site(self) -> str:
        return self.stack[0] if self.stack else "an unknown place"

    def is_same(self, other: Call) -> bool:
        """Directories may differ where each rank has put the time into its name; rank 0's counts then."""
        same_line = (self.stack, self.step) == (other.stack, other.step)
        return self.kind == other.kind and (self.where == other.where or same_line)

    def was(self, past: Call) -> bool:
        """Whether a past meeting was the one that this rank has come to, too late."""
        return self.is_same(past) and (self.step == past.step or self.stack == past.stack)


class Attendance(NamedTuple):
    """Who takes part."""

    meeting: int
    missing: list[int]
    where: str
    """The directory that rank 0 has named."""

    @property
    def complete(self) -> bool:
        return not self.missing


class Quorum:
    """The meetings of one group of ranks; rank 0 leads them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._store: Any = group.store
        self._rank = group.rank
        self._others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._came = dict.fromkeys(range(group.world_size), 0)
        """How often each rank has come, as far as this rank knows; of the others only rank 0 does."""
        self._settled = dict.fromkeys(range(group.world_size), 0)
        """The last meeting that each of them was in or too late for."""
        self._meetings = 0
        self._past: list[tuple[int, Call]] = []
        self._lonely: set[tuple[str, ...]] = set()
        """Calls to which nobody else came the last time."""

    def attend(self, call: Call, *, needs_all: bool, patience: float, limit: float) -> Attendance:
        """Meet those who come to the same call.

        Args:
            needs_all: whether it is an error that some do not come.
            patience: seconds that rank 0 waits for the others.
            limit: seconds that the others wait for rank 0.

        Raises:
            RuntimeMisuse: somebody is missing who is needed.
        """
        if self._rank == 0:
            return self._lead(call, needs_all=needs_all, patience=patience)
        return self._follow(call, limit=limit)

    def report(self, meeting: int, *, done: str = "", problem: str = "") -> None:
        """On rank 0: how it went, for those who came to an incomplete meeting."""
        self._store.set(f"attend/result/{meeting}", json.dumps([done, problem]))

    def result(self, meeting: int, *, limit: float) -> str:
        """What rank 0 reports of an incomplete meeting.

        Raises:
            CheckpointError: it failed there, or nothing was heard in ``limit`` seconds.
        """
        key = f"attend/result/{meeting}"
        if not self._wait(lambda: self._store.check([key]), limit):
            raise CheckpointError(f"rank 0 has not said for {limit:.0f} s how its save went")
        done, problem = json.loads(self._store.get(key))
        if problem:
            raise CheckpointError(f"{problem} (on rank 0)")
        return str(done)

    # -- rank 0

    def _lead(self, call: Call, *, needs_all: bool, patience: float) -> Attendance:
        if tuple(call.stack) in self._lonely and not needs_all:
            patience /= 5
        here, elsewhere = self._gather_in(call, patience)
        missing = [rank for rank in self._others if rank not in here]
        self._meetings += 1
        problem = _absent(call, missing, elsewhere, patience) if missing and needs_all else ""
        self._close(call, here, missing, problem)
        if problem:
            self._give_up(problem)
        if missing and not here:
            self._lonely.add(tuple(call.stack))
        return Attendance(self._meetings, missing, call.where)

    def _gather_in(self, call: Call, patience: float) -> tuple[list[int], dict[int, Call]]:
        """Who has come to this call, and who waits at another, until nobody else can come or the time is over."""
        here: list[int] = []
        elsewhere: dict[int, Call] = {}

        def look() -> bool:
            here.clear()
            elsewhere.clear()
            for rank in self._others:
                came = self._arrival(rank)
                if came is not None and came.is_same(call):
                    here.append(rank)
                elif came is not None:
                    elsewhere[rank] = came
            return len(here) + len(elsewhere) == len(self._others)

        self._wait(look, patience)
        return here, elsewhere

    def _arrival(self, rank: int) -> Call | None:
        """To what this rank has come and waits now; those who came too late are passed over."""
        while self._store.check([self._key(rank)]):
            call = _read(self._store.get(self._key(rank)))
            late = self._too_late(rank, call, self._past)
            if late is None:
                return call
            self._lonely.discard(tuple(call.stack))
            self._settle(rank, late)
        return None

    def _close(self, call: Call, here: list[int], missing: list[int], problem: str) -> None:
        if missing and not problem:
            self._past = [*self._past, (self._meetings, call)][-REMEMBERED:]
            self._store.set("attend/past", json.dumps(self._past))
        for rank in here:
            self._store.set(f"{self._key(rank)}/told", json.dumps([self._meetings, missing, call.where, problem]))
            self._settle(rank, self._meetings)

    # -- the others

    def _follow(self, call: Call, *, limit: float) -> Attendance:
        key = self._key(self._rank)
        self._store.set(key, json.dumps(call))
        late: int | None = None

        def told() -> bool:
            nonlocal late
            if self._store.check([f"{key}/told"]):
                return True
            if self._store.check(["attend/past"]):
                past = [(number, Call(*item)) for number, item in json.loads(self._store.get("attend/past"))]
                late = self._too_late(self._rank, call, past)
            return late is not None

        if limit > WARN_AFTER_SECONDS and not self._wait(told, WARN_AFTER_SECONDS):
            print(f"hpcaccel: rank {self._rank} waits for rank 0 in {call.kind} at {call.site}", file=sys.stderr)
            limit -= WARN_AFTER_SECONDS
        if not self._wait(told, limit):
            self._store.delete_key(key)  # else rank 0 would count on this rank
            self._give_up(_absent(call, [0], {}, limit))
        if late is not None:
            self._settle(self._rank, late)
            return Attendance(late, [self._rank], call.where)
        meeting, missing, where, problem = json.loads(self._store.get(f"{key}/told"))
        self._store.delete_key(f"{key}/told")
        self._settle(self._rank, meeting)
        if problem:
            raise RuntimeMisuse(problem)
        return Attendance(meeting, missing, where)

    # -- both

    def _give_up(self, text: str) -> NoReturn:
        if self._group.exchange is not None:
            self._group.exchange.rollcall.give_up(text)
        raise RuntimeMisuse(text)

    def _key(self, rank: int) -> str:
        return f"attend/{rank}/{self._came[rank]}"

    def _too_late(self, rank: int, call: Call, past: list[tuple[int, Call]]) -> int | None:
        return next((number for number, item in past if number > self._settled[rank] and call.was(item)), None)

    def _settle(self, rank: int, meeting: int) -> None:
        if rank != self._rank:
            self._store.delete_key(self._key(rank))
        self._came[rank] += 1
        self._settled[rank] = meeting

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float) -> bool:
        """Until it holds, at most so long; it is looked at once at least."""
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True


def _read(text: bytes) -> Call:
    return Call(*json.loads(text))


def _absent(call: Call, missing: list[int], elsewhere: dict[int, Call], seconds: float) -> str:
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    others = "".join(f"; rank {rank} waits in {item.kind} at {item.site}" for rank, item in elsewhere.items())
    have = "have" if len(missing) > 1 else "has"
    return (
        f"{call.kind} at {call.site}: {names} {have} not come in {seconds:.0f} s{others}. All ranks must call it, for "
        "each holds a part or is to get one: take it out of `if accelerator.is_main_process:` and the like"
    )


_latest: tuple[Any, Quorum] | None = None


def of(group: Group) -> Quorum:
    """The one quorum of this group of ranks."""
    global _latest
    if _latest is None or _latest[0] is not group.store:
        _latest = (group.store, Quorum(group))
    return _latest[1]


def attend(
    group: Group, kind: str, *, where: str = "", step: int = 0, needs_all: bool, patience: float, limit: float
) -> Attendance:
    """Meet the other ranks at the script's call; see ``Quorum.attend``."""
    if group.store is None:
        return Attendance(0, [], where)
    call = Call(kind, where, step, call_stack())
    return of(group).attend(call, needs_all=needs_all, patience=patience, limit=limit)
