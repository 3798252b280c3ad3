"""Whether the ranks hang, which of them keeps the others waiting, and what is done: stacks, a word, an end.

A hang is nobody doing anything for a long time, or one rank that has stopped giving signs of life while the others
wait. What comes before the training loop and behind it is not judged: there a program may do what it likes for hours.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hpcaccel.core.process_identity import node_name
from hpcaccel.core.records import Hang, to_dict
from hpcaccel.core.run_dir import RunDir, atomic_write, make_folder, write_json
from hpcaccel.node.failures.heartbeats import Heartbeats, Sign
from hpcaccel.node.retry_io import if_possible

__all__ = ["HangWatch", "culprit", "find_hang", "limit_seconds"]

LEAST_SECONDS = 600.0
STEPS = 20
"""A step that takes so many times the usual hangs."""
PATIENT = 3
"""So many times longer for the first step, which compiles, for loads and saves, for ranks that are seen at one place
after another, and for a lone rank, for which nobody waits."""
SILENT_BEATS = 6
"""A rank is silent that has left out so many beats."""
SILENT_SECONDS = 300.0
"""A silent rank hangs when the others have waited for so long: C code that keeps Python's lock may take a while."""
LOOK_SECONDS = 30.0
DUMP_SECONDS = 5.0
"""How long ranks may take to write down where they are, before they are killed."""
WAKE_SECONDS = 0.1
ASK_SECONDS = 3.0
"""Between a request for stacks and the signal to those who do not answer by themselves: that, and two beats."""
JUDGED = ("loading", "training", "evaluating", "saving")


class Ranks(Protocol):
    def dump(self) -> None:
        """Have every rank write where it is; one that has been stopped does so when it is woken."""
        ...

    def wake(self) -> None:
        """Have ranks that have been stopped go on."""
        ...


def limit_seconds(setting: int | None, signs: Sequence[Sign]) -> float:
    """How long nothing may happen: what the spec says, else by the slowest rank's steps. 0: for ever."""
    if setting is not None:
        return float(setting)
    steps = [sign.beat.step_seconds for sign in signs if sign.beat.step_seconds is not None]
    return max(LEAST_SECONDS, STEPS * max(steps, default=0.0))


def find_hang(signs: Sequence[Sign], setting: int | None, stopped: Callable[[Sign], bool]) -> Hang | None:
    """The hang that these signs of all ranks show, or None.

    Args:
        setting: ``resilience.hang_timeout_seconds``.
        stopped: whether a silent rank is known to be stopped (SIGSTOP).
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
        if _judged(others) and _came_along(silent, others) and waited > min(limit, SILENT_SECONDS):
            return _silent_hang(silent[0], silent, how="stopped, or in C code that keeps Python's lock")
    if there and _judged(there) and all(_nothing_for(sign, limit, alone=len(signs) == 1) for sign in there):
        if not left:
            return culprit(there)
        # One that works by itself behind the others' end waits for nobody.
        if all(sign.beat.waits or sign.beat.waits_in for sign in there):
            return _left_hang(left, there)
    return None


def _apart(signs: Sequence[Sign]) -> tuple[list[Sign], list[Sign]]:
    """The ranks that are at the end of the program, and those that are not."""
    left = [sign for sign in signs if sign.beat.phase == "leaving"]
    return left, [sign for sign in signs if sign.beat.phase != "leaving"]


def _left_hang(left: Sequence[Sign], there: Sequence[Sign]) -> Hang:
    beat = left[0].beat
    how = f"left its loop at {beat.left} and " if beat.left else ""
    also = f", as {len(left) - 1} more ranks have" if len(left) > 1 else ""
    site = Counter(sign.beat.site for sign in there).most_common(1)[0][0]
    waited = min(sign.idle for sign in there)
    return Hang(
        why=f"rank {beat.rank} on {beat.host} has {how}reached the end of the program at step {beat.step}{also}, and "
        f"the others have waited for {waited:.0f} s at {site}",
        culprit_rank=beat.rank,
        node=beat.host,
        time=time.time(),
    )


def _judged(signs: Sequence[Sign]) -> bool:
    return all(sign.beat.phase in JUDGED for sign in signs)


def _came_along(silent: Sequence[Sign], others: Sequence[Sign]) -> bool:
    """Whether the silent ones are in the loop, too. One that said "starting" last is, if the others have done a step:
    they do none without it."""
    stepped = all(sign.beat.step > sign.beat.first_step for sign in others)
    return all(sign.beat.phase in JUDGED or (sign.beat.phase == "starting" and stepped) for sign in silent)


def _nothing_for(sign: Sign, limit: float, *, alone: bool) -> bool:
    beat = sign.beat
    patient = alone or beat.phase in ("loading", "saving") or beat.step <= beat.first_step + 1
    if sign.idle <= (PATIENT * limit if patient else limit):
        return False
    # Somebody who is seen at other places does something, for a while.
    return sign.still > limit or sign.idle > PATIENT * limit


def _silent_hang(sign: Sign, silent: Sequence[Sign], *, how: str) -> Hang:
    beat = sign.beat
    hosts = {other.beat.host for other in silent}
    also = f"; {len(silent) - 1} more ranks are silent{_on_one(hosts)}" if len(silent) > 1 else ""
    return Hang(
        why=f"rank {beat.rank} on {beat.host} has given no sign of life for {sign.silent:.0f} s ({how}; step "
        f"{beat.step}, last seen at {beat.site}), and the others wait{also}",
        culprit_rank=beat.rank,
        node=beat.host,
        time=time.time(),
    )


def _on_one(hosts: set[str]) -> str:
    return f", all on {next(iter(hosts))}" if len(hosts) == 1 else ""


def culprit(signs: Sequence[Sign]) -> Hang:
    """Who keeps the others waiting: whoever does not wait, has come less far, or is somewhere else than all others."""
    idle = min(sign.idle for sign in signs)
    found, reason = _odd_one(signs)
    if found is None:
        site = Counter(sign.beat.site for sign in signs).most_common(1)[0][0]
        why = f"nothing has happened for {idle:.0f} s, and no rank stands out: {len(signs)} at {site}"
        return Hang(why=why, time=time.time())
    beat = found.beat
    return Hang(
        why=f"nothing has happened for {idle:.0f} s: the others wait for rank {beat.rank} on {beat.host}, which "
        f"{reason} (step {beat.step}, at {beat.site})",
        culprit_rank=beat.rank,
        node=beat.host,
        time=time.time(),
    )


def _odd_one(signs: Sequence[Sign]) -> tuple[Sign | None, str]:
    if len(signs) == 1:
        return signs[0], "is alone"
    silent = [sign for sign in signs if sign.silent > SILENT_BEATS * sign.beat.interval_seconds]
    if 0 < len(silent) < len(signs):
        return silent[0], f"has given no sign of life for {silent[0].silent:.0f} s"
    if behind := _fewest(signs, [sign.beat.step for sign in signs]):
        return behind, "has done fewer steps"
    working = [sign for sign in signs if not (sign.beat.waits or sign.beat.waits_in)]
    if 0 < len(working) < len(signs):
        return working[0], "is not in the collective that they wait in"
    if behind := _fewest(signs, [sign.beat.calls for sign in signs]):
        return behind, "has come to fewer calls"
    sites = Counter(sign.beat.site for sign in signs)
    odd, count = min(sites.items(), key=lambda item: item[1])
    if len(sites) > 1 and 2 * count < len(signs):
        return next(sign for sign in signs if sign.beat.site == odd), "is in another line"
    return None, ""


def _fewest(signs: Sequence[Sign], numbers: Sequence[int]) -> Sign | None:
    return signs[numbers.index(min(numbers))] if min(numbers) < max(numbers) else None


class HangWatch:
    """Looks at the ranks of one attempt now and then, and passes requests for stacks on to them."""

    def __init__(self, run: RunDir, attempt: int, *, setting: int | None, say: Callable[[str], None]) -> None:
        self._run, self._attempt, self._setting, self._say = run, attempt, setting, say
        self._beats = Heartbeats(run, attempt)
        self._look_at = 0.0
        self._every = 1.0
        self._signal_at: float | None = None
        self._asked = 0
        self._kill_at: float | None = None
        if_possible(lambda: make_folder(run.stacks(attempt), within=run.path), say=say)

    def look(self, ranks: Ranks, *, judging: bool) -> bool:
        """Whether the ranks are to be killed now: they hang, and have had the time to write their stacks.

        Args:
            judging: look for hangs; not where the ranks have been asked to leave, which has a limit of its own.
        """
        try:
            self._pass_requests_on(ranks)
            now = time.monotonic()
            if self._kill_at is None and now >= self._look_at and self._setting != 0 and judging:
                self._judge(ranks, now)
        except OSError as error:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._say(f"the ranks' health is not known: {error}")
        if self._kill_at is None or time.monotonic() < self._kill_at:
            return False
        self._kill_at = float("inf")
        # A rank that has been stopped writes its stacks as soon as it is woken, and is not to come any further.
        ranks.wake()
        time.sleep(WAKE_SECONDS)
        return True

    def _judge(self, ranks: Ranks, now: float) -> None:
        signs = self._beats.look(expected_seconds=self._every)
        self._every = self._pause(signs)
        self._look_at = now + self._every
        hang = find_hang(signs, self._setting, is_stopped)
        if hang is None:
            return
        self._kill_at = time.monotonic() + DUMP_SECONDS
        self._say(f"the ranks hang: {hang.why}. Their stacks: {self._run.stacks(self._attempt)}")
        ranks.dump()
        write_json(self._run.hang(self._attempt), to_dict(hang))

    def _pause(self, signs: Sequence[Sign]) -> float:
        """Until the next look: each reads a file of every rank."""
        wanted = limit_seconds(self._setting, signs) / 20
        beats = max((sign.beat.interval_seconds for sign in signs), default=LOOK_SECONDS)
        return max(1.0, min(wanted, beats, LOOK_SECONDS))

    def _pass_requests_on(self, ranks: Ranks) -> None:
        """Ranks answer by themselves, at a moment that suits them; those who cannot are signalled."""
        asked = stacks_requests(self._run)
        if asked:
            self._asked = max(self._asked + 1, time.time_ns())
            atomic_write(self._run.stacks(self._attempt) / "asked", str(self._asked), sync=False)
            for path in asked:
                path.rename(path.with_name(f"honoured-{path.name}"))
            beats = [sign.beat.interval_seconds for sign in self._beats.look(expected_seconds=self._every)]
            self._signal_at = time.monotonic() + ASK_SECONDS + 2 * max(beats, default=0.0)
        if self._signal_at is not None and time.monotonic() > self._signal_at:
            self._signal_at = None
            if silent := self._unanswered():
                self._say(f"asked for their stacks, {len(silent)} ranks do not answer: signalling")
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


def stacks_requests(run: RunDir) -> list[Path]:
    """Requests of ``hpcaccel stacks`` that nobody honoured yet."""
    try:
        with os.scandir(run.control) as entries:
            return [Path(entry.path) for entry in entries if entry.name.startswith("stacks-")]
    except OSError:
        return []  # said by whoever looks for other requests there


def is_stopped(sign: Sign) -> bool:
    """Whether a rank on this very node has been stopped by a signal; see proc(5). Of other nodes nothing is known."""
    if sign.beat.host != node_name():
        return False
    try:
        with open(f"/proc/{sign.beat.pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
