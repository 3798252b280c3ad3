"""Who has come to a collective and who has not: so that a call that only some ranks make ends with its line in the
script and the missing ranks, instead of hanging.

While everybody comes in time nothing is looked up and nothing is written. A rank that has waited for some seconds says
in the store what it waits for, and reads what the others say. Two ranks that wait for each other in different calls
will wait for ever, and so will one whose partner has left the program: both are errors at once. Otherwise the
collective's timeout decides. Whoever gives up leaves word for the others, who give up too.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn

from hpcaccel.errors import RankFailed, RuntimeMisuse
from hpcaccel.runtime.distributed.abandoned_groups import abandon
from hpcaccel.runtime.distributed.collectives.call_site import call_site
from hpcaccel.slurm.hostlist import ranks_text

__all__ = ["CALLS", "TICKS", "Rollcall"]

PATIENCE_SECONDS = 5.0
"""How long a rank waits before it looks for the others. HPCACCEL_PATIENCE_SECONDS overrides it."""
LOOK_SECONDS = 1.0
WARNING_SECONDS = 60.0
LOOKS_AT_ONCE = 64
"""How many other ranks are looked at each time: the store answers all ranks, so that each must ask for little."""
LAST_WORD_SECONDS = 2.0
FIRST_PAUSE_SECONDS = 0.005

CALLS = "calls"
TICKS = "ticks"


class Rollcall:
    """The calls that this rank has made together with the others, by number on each channel.

    A channel is a sequence of collectives that every rank goes through in the same order: what the script calls, and
    the ticks of the stop agreement. Both need all ranks, which is what makes the proof of a deadlock hold.
    """

    def __init__(self, *, rank: int, world_size: int, store: Any, timeout_seconds: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        """Of what the script calls."""
        self.control_timeout_seconds = 60.0
        """Of what the runtime needs for itself."""
        self.entered: Counter[str] = Counter()
        self.broken: str | None = None
        """Why no call can work any more."""
        self.waits_in: str | None = None
        """What this rank has waited in for a while, for its heartbeat to read."""
        self.left_at: str | None = None
        """``file:line`` where this rank has left its loop before the end."""
        self._meetings = 0
        """At the end of the program, so far."""
        self._store = store
        self._patience = float(os.environ.get("HPCACCEL_PATIENCE_SECONDS", PATIENCE_SECONDS))
        self._next_look = rank + 1

    def enter(self, channel: str = CALLS) -> int:
        """This rank takes part in the next collective of the channel; its number.

        Raises:
            RuntimeMisuse: an earlier one has failed, so that the ranks no longer agree on which is the next.
        """
        if self.broken is not None:
            raise RuntimeMisuse(f"an earlier call has failed, and the ranks cannot go on together: {self.broken}")
        self.entered[channel] += 1
        return self.entered[channel]

    def wait(self, work: Any, what: str, *, channel: str = CALLS, number: int, limit: float | None = None) -> None:
        """Wait until the asynchronous collective ``work`` is done.

        Args:
            what: what the script calls, for the message.
            number: what ``enter`` answered.
            limit: seconds; default: the timeout of what the script calls.

        Raises:
            RuntimeMisuse: ranks are missing, and either will not come or have not come within the limit.
            RankFailed: another rank has failed.
        """
        limit = self.timeout_seconds if limit is None else limit
        try:
            if not _is_done(work, min(self._patience, limit)):
                self._wait_long(work, what, channel, number, limit)
            return
        except RuntimeError as error:
            failure = str(error)
        self._lost(what, failure)

    def say_gone(self, how: str) -> None:
        """This rank will not come to any further call: for those who wait for it."""
        self._publish({"gone": how})

    def say_failed(self, how: str) -> None:
        """This rank dies."""
        self.say_gone(f"has failed {how}")
        try:
            self._store.set("failed", str(self.rank))
        except RuntimeError:
            pass  # the store's host has gone; nobody is left to read it

    def say_at_end(self) -> None:
        """This rank has come to the end of the program."""
        left = "" if self.left_at is None else f" (it left its loop at {self.left_at})"
        self.say_gone(f"has reached the end of the program{left}")

    def meet_at_end(self, seconds: float) -> str | None:
        """Wait for all ranks to come here, in the store: a collective would meet those that the others are in.

        Returns:
            Why they have not come; None: all have.
        """
        self._meetings += 1
        key, give_up, pause = f"end/{self._meetings}", time.monotonic() + seconds, FIRST_PAUSE_SECONDS
        try:
            if self._store.add(f"{key}/here", 1) == self.world_size:
                self._store.set(f"{key}/all", "")
            while not self._store.check([f"{key}/all"]):
                if self._store.check(["failed"]) or self._store.check(["word"]):
                    return "a rank has failed"
                if time.monotonic() > give_up:
                    here = self._store.add(f"{key}/here", 0)
                    return f"{here} of {self.world_size} ranks have come to the end of the program in {seconds:.0f} s"
                time.sleep(pause)
                pause = min(1.5 * pause, LOOK_SECONDS)
            self._store.add(f"{key}/read", 1)
            # Rank 0 may be the store's host: it stays until all have read that all are here.
            give_up = min(give_up, time.monotonic() + LAST_WORD_SECONDS)
            while self.rank == 0 and self._store.add(f"{key}/read", 0) < self.world_size and time.monotonic() < give_up:
                time.sleep(FIRST_PAUSE_SECONDS)
        except RuntimeError as error:
            return f"the ranks' store has gone ({error})"
        return None

    def who_has_gone(self) -> list[str]:
        """The ranks that have come to the end of the program, in words."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        gone = [(rank, str(said["gone"])) for rank, said in self._said(others) if "gone" in said]
        return [f"rank {rank} {how}" for rank, how in gone if how.startswith("has reached")]

    def say_here(self) -> None:
        """After all: this rank has met the others and goes on with them."""
        self._publish({})

    def last_word(self) -> str | None:
        """Why another rank has given up, as far as it could say it."""
        try:
            return str(json.loads(self._store.get("word"))["text"]) if self._store.check(["word"]) else None
        except RuntimeError:
            return None  # the store's host has gone

    def give_up(self, text: str) -> NoReturn:
        """For those who find out elsewhere that the ranks cannot go on together.

        Raises:
            RuntimeMisuse: always; and so does whatever the other ranks wait in.
        """
        self._give_up(text)

    def _wait_long(self, work: Any, what: str, channel: str, number: int, limit: float) -> None:
        started = time.monotonic() - min(self._patience, limit)
        site = call_site()
        warned = False
        self._publish({"channel": channel, "number": number, "what": what, "site": site})
        self.waits_in = what
        try:
            while not _is_done(work, min(LOOK_SECONDS, self._patience)):
                waited = time.monotonic() - started
                self._look(what, site, channel, number)
                if waited >= limit:
                    self._give_up(self._timeout_text(what, site, channel, number, limit))
                if waited >= WARNING_SECONDS and not warned:
                    warned = True
                    self._warn(self._missing_text(what, site, channel, number, waited))
        finally:
            self.waits_in = None
            self._publish({})

    # -- what the others say ----------------------------------------------------------------------------------------

    def _look(self, what: str, site: str, channel: str, number: int) -> None:
        """
        Raises:
            RuntimeMisuse: somebody has given up, or it is certain that somebody will not come.
            RankFailed: somebody who is needed has failed.
        """
        self._heed(what, site)
        for rank, said in self._said(self._some_ranks()):
            if said["entered"].get(channel, 0) >= number:
                continue
            if "gone" in said:
                text = f"rank {self.rank} waits in {what} at {site} for rank {rank}, which {said['gone']}"
                if said["gone"].startswith("has failed"):
                    self._give_up(text, kind=RankFailed)
                self._give_up(f"{text} without coming there. {_ADVICE}")
            if said.get("number") and self.entered[said["channel"]] < said["number"]:
                self._give_up(
                    f"rank {self.rank} waits in {what} at {site} for rank {rank}, which waits in {said['what']} at "
                    f"{said['site']} for rank {self.rank}: neither will come. {_ADVICE}"
                )

    def _some_ranks(self) -> list[int]:
        """The next few of the others, in turn."""
        count = min(LOOKS_AT_ONCE, self.world_size)
        first, self._next_look = self._next_look, self._next_look + count
        ranks = ((first + step) % self.world_size for step in range(count))
        return [rank for rank in ranks if rank != self.rank]

    def _said(self, ranks: Iterable[int]) -> list[tuple[int, dict[str, Any]]]:
        """What these ranks have said, where they have. A store that has gone says nothing."""
        found = []
        try:
            for rank in ranks:
                if self._store.check([f"said/{rank}"]):
                    found.append((rank, json.loads(self._store.get(f"said/{rank}"))))
        except RuntimeError:
            pass  # its host has gone, which the collective itself is about to find out
        return found

    def _publish(self, said: dict[str, Any]) -> None:
        try:
            self._store.set(f"said/{self.rank}", json.dumps({"entered": dict(self.entered), **said}))
        except RuntimeError:
            pass  # as above; nobody is left to read it

    def _heed(self, what: str, site: str) -> None:
        """
        Raises:
            RuntimeMisuse, RankFailed: somebody has given up.
        """
        try:
            if not self._store.check(["word"]):
                return
            word = json.loads(self._store.get("word"))
        except RuntimeError:
            return  # as above
        text = f"rank {self.rank} waits in {what} at {site}. {word['text']}"
        self._give_up(text, kind=RankFailed if word["failed"] else RuntimeMisuse)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _give_up(self, text: str, kind: type[Exception] = RuntimeMisuse) -> NoReturn:
        self.broken = text
        try:
            self._store.compare_set("word", "", json.dumps({"text": text, "failed": kind is RankFailed}))
        except RuntimeError:
            pass  # nobody is left to read it
        abandon()
        raise kind(text)

    def _lost(self, what: str, failure: str) -> NoReturn:
        """The collective has failed, most often because a rank has gone: say who and why, if they could say it."""
        site = call_site()
        short = re.sub(r"^\[[^]]*\] *", "", failure.strip().partition("\n")[0]).partition(". ")[0]
        deadline = time.monotonic() + LAST_WORD_SECONDS
        while time.monotonic() < deadline:
            self._heed(what, site)
            for rank, said in self._said(range(self.world_size)):
                if "gone" in said:
                    self._give_up(
                        f"rank {self.rank} waits in {what} at {site} for rank {rank}, which {said['gone']} ({short})",
                        kind=RankFailed,
                    )
            time.sleep(0.1)
        self._give_up(f"{what} at {site} failed on rank {self.rank}: another rank has gone ({short})", kind=RankFailed)

    def _missing(self, channel: str, number: int) -> list[int]:
        here = {self.rank}
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        here |= {rank for rank, said in self._said(others) if said["entered"].get(channel, 0) >= number}
        return [rank for rank in others if rank not in here]

    def _timeout_text(self, what: str, site: str, channel: str, number: int, limit: float) -> str:
        return f"{self._missing_text(what, site, channel, number, limit)}, which is the limit. {_ADVICE}"

    def _missing_text(self, what: str, site: str, channel: str, number: int, waited: float) -> str:
        missing = self._missing(channel, number)
        whom = f"{ranks_text(missing)} of {self.world_size}" if missing else "data from the others"
        return f"rank {self.rank} has waited {waited:.0f} s in {what} at {site} for {whom}"

    def _warn(self, text: str) -> None:
        print(f"hpcaccel: {text}. The limit is {self.timeout_seconds:.0f} s", file=sys.stderr, flush=True)


_ADVICE = "All ranks must make the same calls in the same order: is one of them inside an `if is_main_process`?"


def _is_done(work: Any, seconds: float) -> bool:
    """
    Raises:
        RuntimeError: the collective has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # says what went wrong, or that it has just come
    return True
