"""Hang detection: whether the ranks hang, which rank the others wait for, and the response (dump stacks, record, kill).

The ranks hang if none of them has made progress for a long time, or if one has sent no heartbeat while the others wait.
Slow code before and after the training loop is not a hang: it may take hours.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hpcaccel.core.durable_files import atomic_write, make_folder, write_json
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.records import Hang, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import mark_honoured, stacks_requests
from hpcaccel.node.failures.disk_space import if_possible
from hpcaccel.node.failures.heartbeats import Heartbeats, RankSign

__all__ = ["HangWatch", "culprit", "find_hang", "limit_seconds"]

log = logging.getLogger(__name__)

LEAST_SECONDS = 600.0
STEPS = 20
"""The default limit is this multiple of the slowest rank's step duration, but at least ``LEAST_SECONDS``."""
PATIENT = 3
"""The limit is multiplied by this factor where a rank may take longer: in the first two steps, which may compile; in
loads and saves; while the rank's stack changes; and for a single rank, for which no other rank waits."""
SILENT_BEATS = 6
"""A rank counts as silent after this number of missing heartbeats."""
SILENT_SECONDS = 300.0
"""A silent rank counts as hanging once the other ranks have waited for this time, or for the limit if that is
shorter. C code that holds the GIL may take a while."""
LOOK_SECONDS = 30.0
"""Longest interval between two checks for hangs."""
DUMP_SECONDS = 5.0
"""How long the ranks may take to dump their stacks before they are killed."""
WAKE_SECONDS = 0.1
"""How long stopped ranks may take to write their stacks after SIGCONT, before they are killed."""
ASK_SECONDS = 3.0
"""The ranks are signalled if some have not written requested stacks after this time plus two heartbeat intervals."""
JUDGED = ("loading", "training", "evaluating", "saving")
"""Phases in which a rank may be found to hang."""


class DumpableRanks(Protocol):
    def dump(self) -> None:
        """Make every rank write its stacks. A stopped rank (SIGSTOP) writes them once it is woken."""
        ...

    def wake(self) -> None:
        """Send SIGCONT to ranks that are stopped (SIGSTOP)."""
        ...


def limit_seconds(setting: int | None, signs: Sequence[RankSign]) -> float:
    """How many seconds the ranks may go without progress: ``setting`` from the spec, else a value derived from the
    slowest rank's step duration. 0 means that there is no limit."""
    if setting is not None:
        return float(setting)
    steps = [sign.beat.step_seconds for sign in signs if sign.beat.step_seconds is not None]
    return max(LEAST_SECONDS, STEPS * max(steps, default=0.0))


def find_hang(signs: Sequence[RankSign], setting: int | None, stopped: Callable[[RankSign], bool]) -> Hang | None:
    """The hang that the heartbeats of all ranks show, or None if the ranks do not hang.

    Args:
        setting: ``resilience.hang_timeout_seconds``.
        stopped: returns whether a silent rank is known to be stopped (SIGSTOP).
    """
    limit = limit_seconds(setting, signs)
    if not signs or not limit:
        return None
    left, there = _apart(signs)
    silent = [sign for sign in there if sign.silent > SILENT_BEATS * sign.beat.interval_seconds]
    others = [sign for sign in there if sign.silent <= SILENT_BEATS * sign.beat.interval_seconds]
    if silent and others:
        waited = min(sign.idle for sign in others)
        for sign in silent:
            if stopped(sign) and waited > SILENT_BEATS * sign.beat.interval_seconds:
                return _silent_hang(sign, silent, how="its process is stopped (SIGSTOP)")
        if _judged(others) and _have_started_training(silent, others) and waited > min(limit, SILENT_SECONDS):
            return _silent_hang(silent[0], silent, how="stopped, or in C code that holds the GIL")
    if there and _judged(there) and all(_nothing_for(sign, limit, alone=len(signs) == 1) for sign in there):
        if not left:
            return culprit(there)
        # A rank that is still working does not wait for the ranks that have left the loop.
        if all(sign.beat.waits or sign.beat.waits_in for sign in there):
            return _left_hang(left, there)
    return None


def _apart(signs: Sequence[RankSign]) -> tuple[list[RankSign], list[RankSign]]:
    """Returns the ranks at the end of the program, and the other ranks."""
    left = [sign for sign in signs if sign.beat.phase == "leaving"]
    return left, [sign for sign in signs if sign.beat.phase != "leaving"]


def _left_hang(left: Sequence[RankSign], there: Sequence[RankSign]) -> Hang:
    beat = left[0].beat
    how = f"left its loop at {beat.left} and " if beat.left else ""
    also = f", like {len(left) - 1} other {'ranks' if len(left) > 2 else 'rank'}" if len(left) > 1 else ""
    site = Counter(sign.beat.site for sign in there).most_common(1)[0][0]
    waited = min(sign.idle for sign in there)
    return Hang(
        why=f"rank {beat.rank} on {beat.host} has {how}reached the end of the program at step {beat.step}{also}; the "
        f"remaining ranks have been waiting for {waited:.0f} s at {site}",
        culprit_rank=beat.rank,
        node=beat.host,
        time=time.time(),
    )


def _judged(signs: Sequence[RankSign]) -> bool:
    return all(sign.beat.phase in JUDGED for sign in signs)


def _have_started_training(silent: Sequence[RankSign], others: Sequence[RankSign]) -> bool:
    """Whether the silent ranks have reached the training loop. A rank whose last known phase is "starting" has reached
    it if the other ranks have done a step, because they cannot do a step without this rank."""
    stepped = all(sign.beat.step > sign.beat.first_step for sign in others)
    return all(sign.beat.phase in JUDGED or (sign.beat.phase == "starting" and stepped) for sign in silent)


def _nothing_for(sign: RankSign, limit: float, *, alone: bool) -> bool:
    """Whether a rank has made no progress for ``limit`` seconds. ``PATIENT`` lists the cases with a longer limit."""
    beat = sign.beat
    patient = alone or beat.phase in ("loading", "saving") or beat.step <= beat.first_step + 1
    if sign.idle <= (PATIENT * limit if patient else limit):
        return False
    # A rank whose stack changes is working; it gets a longer limit.
    return sign.still > limit or sign.idle > PATIENT * limit


def _silent_hang(sign: RankSign, silent: Sequence[RankSign], *, how: str) -> Hang:
    beat = sign.beat
    hosts = {other.beat.host for other in silent}
    more = "1 more rank sends" if len(silent) == 2 else f"{len(silent) - 1} more ranks send"
    also = f"; {more} no heartbeat either{_on_one(hosts)}" if len(silent) > 1 else ""
    return Hang(
        why=f"rank {beat.rank} on {beat.host} has sent no heartbeat for {sign.silent:.0f} s ({how}; step "
        f"{beat.step}, last seen at {beat.site}), and the other ranks are waiting{also}",
        culprit_rank=beat.rank,
        node=beat.host,
        time=time.time(),
    )


def _on_one(hosts: set[str]) -> str:
    return f", all on {next(iter(hosts))}" if len(hosts) == 1 else ""


def culprit(signs: Sequence[RankSign]) -> Hang:
    """The hang, with the rank that the other ranks wait for if one rank stands out. The criteria in order: this rank is
    silent, has done fewer steps, is not in the collective, has made fewer collective calls, or is at another line."""
    idle = min(sign.idle for sign in signs)
    found, reason = _odd_one(signs)
    if found is None:
        site, count = Counter(sign.beat.site for sign in signs).most_common(1)[0]
        why = f"no rank has made progress for {idle:.0f} s: {count} of {len(signs)} ranks are at {site}"
        return Hang(why=why, time=time.time())
    beat = found.beat
    who, where = f"rank {beat.rank} on {beat.host}", f"(step {beat.step}, at {beat.site})"
    why = f"no rank has made progress for {idle:.0f} s: the other ranks are waiting for {who}, which {reason} {where}"
    return Hang(
        why=why if len(signs) > 1 else f"{who} has made no progress for {idle:.0f} s {where}",
        culprit_rank=beat.rank,
        node=beat.host,
        time=time.time(),
    )


def _odd_one(signs: Sequence[RankSign]) -> tuple[RankSign | None, str]:
    if len(signs) == 1:
        return signs[0], ""
    silent = [sign for sign in signs if sign.silent > SILENT_BEATS * sign.beat.interval_seconds]
    if 0 < len(silent) < len(signs):
        return silent[0], f"has sent no heartbeat for {silent[0].silent:.0f} s"
    if behind := _fewest(signs, [sign.beat.step for sign in signs]):
        return behind, "has done fewer steps"
    working = [sign for sign in signs if not (sign.beat.waits or sign.beat.waits_in)]
    if 0 < len(working) < len(signs):
        return working[0], "has not entered the collective"
    if behind := _fewest(signs, [sign.beat.calls for sign in signs]):
        return behind, "has made fewer collective calls"
    sites = Counter(sign.beat.site for sign in signs)
    odd, count = min(sites.items(), key=lambda item: item[1])
    if len(sites) > 1 and 2 * count < len(signs):
        return next(sign for sign in signs if sign.beat.site == odd), "is at a different line"
    return None, ""


def _fewest(signs: Sequence[RankSign], numbers: Sequence[int]) -> RankSign | None:
    """The first rank with the smallest number, or None if all numbers are equal."""
    return signs[numbers.index(min(numbers))] if min(numbers) < max(numbers) else None


class HangWatch:
    """Checks the ranks of one attempt for hangs at intervals, and passes requests for stacks on to the ranks."""

    def __init__(self, run: RunDir, attempt: int, *, setting: int | None) -> None:
        self._run, self._attempt, self._setting = run, attempt, setting
        self._beats = Heartbeats(run, attempt)
        self._look_at = 0.0
        self._every = 1.0
        self._signal_at: float | None = None
        self._last_request = 0
        self._kill_at: float | None = None
        if_possible(lambda: make_folder(run.stacks(attempt), within=run.path))

    def look(self, ranks: DumpableRanks, *, judging: bool) -> bool:
        """Check for a hang. Returns True if the ranks must be killed now: they have had time to write their stacks.

        Args:
            judging: whether to check for hangs. False after a request to stop, which has a time limit of its own.
        """
        try:
            self._pass_requests_on(ranks)
            now = time.monotonic()
            if self._kill_at is None and now >= self._look_at and self._setting != 0 and judging:
                self._judge(ranks, now)
        except OSError as error:
            self._look_at = time.monotonic() + LOOK_SECONDS
            log.warning(f"cannot check the ranks: {error}")
        if self._kill_at is None or time.monotonic() < self._kill_at:
            return False
        self._kill_at = float("inf")
        # A stopped rank writes its stacks as soon as it is woken, and must be killed before it continues to train.
        ranks.wake()
        time.sleep(WAKE_SECONDS)
        return True

    def _judge(self, ranks: DumpableRanks, now: float) -> None:
        signs = self._beats.look(expected_seconds=self._every)
        self._every = self._pause(signs)
        self._look_at = now + self._every
        hang = find_hang(signs, self._setting, is_stopped)
        if hang is None:
            return
        self._kill_at = time.monotonic() + DUMP_SECONDS
        log.warning(f"the ranks hang: {hang.why}. Stacks: {self._run.stacks(self._attempt)}")
        ranks.dump()
        write_json(self._run.hang(self._attempt), to_dict(hang))

    def _pause(self, signs: Sequence[RankSign]) -> float:
        """Seconds until the next check: 1 to 30, depending on the limit, because each check reads one file per rank."""
        wanted = limit_seconds(self._setting, signs) / 20
        beats = max((sign.beat.interval_seconds for sign in signs), default=LOOK_SECONDS)
        return max(1.0, min(wanted, beats, LOOK_SECONDS))

    def _pass_requests_on(self, ranks: DumpableRanks) -> None:
        """Pass requests for stacks on to the ranks through a file. If stacks are missing later, signal the ranks."""
        requests = stacks_requests(self._run)
        if requests:
            self._last_request = max(self._last_request + 1, time.time_ns())
            atomic_write(self._run.stacks(self._attempt) / "asked", str(self._last_request), sync=False)
            for name in requests:
                mark_honoured(self._run, name)
            beats = [sign.beat.interval_seconds for sign in self._beats.look(expected_seconds=self._every)]
            self._signal_at = time.monotonic() + ASK_SECONDS + 2 * max(beats, default=0.0)
        if self._signal_at is not None and time.monotonic() > self._signal_at:
            self._signal_at = None
            if silent := self._unanswered():
                log.warning(f"requested stacks are missing from {len(silent)} of the ranks: signalling all ranks")
                ranks.dump()

    def _unanswered(self) -> list[int]:
        folder = self._run.stacks(self._attempt)
        return [
            sign.beat.rank
            for sign in self._beats.look(expected_seconds=self._every)
            if not _written_since(folder / f"{sign.beat.rank}.txt", folder / "asked")
        ]


def _written_since(path: Path, mark: Path) -> bool:
    try:
        return path.stat().st_mtime_ns >= mark.stat().st_mtime_ns and path.stat().st_size > 0
    except OSError:
        return False


def is_stopped(sign: RankSign) -> bool:
    """Whether a rank on this node is stopped by a signal (see proc(5)). False for ranks on other nodes."""
    if sign.beat.host != node_name():
        return False
    try:
        with open(f"/proc/{sign.beat.pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
