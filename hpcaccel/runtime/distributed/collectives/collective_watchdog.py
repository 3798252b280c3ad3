"""Watchdog of collective calls: detects ranks that do not take part, and raises an error instead of hanging.

For the first ``PATIENCE_SECONDS`` a waiting rank reads and writes nothing. After that it publishes its status (the call
it waits in, the number of calls made) in the ranks' store and polls the status of the other ranks. Two ranks that wait
for each other in different calls are deadlocked, and a rank that has left the program makes no more calls: in both
cases the waiting rank raises an error at once. Otherwise the collective's timeout applies. The first rank that aborts
stores the reason, and the other waiting ranks abort with it.
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
from typing import Any, NamedTuple, NoReturn

from hpcaccel.errors import RankFailed, RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.call_site import call_site
from hpcaccel.runtime.distributed.group_shutdown import EndBarrier, keep_groups
from hpcaccel.slurm.hostlist import ranks_text

__all__ = ["CALLS", "TICKS", "CollectiveWatchdog"]

PATIENCE_SECONDS = 5.0
"""Seconds a rank waits before it polls the other ranks. HPCACCEL_PATIENCE_SECONDS overrides it."""
POLL_SECONDS = 1.0
WARNING_SECONDS = 60.0
RANKS_PER_POLL = 64
"""Number of ranks whose status is read in one poll. The limit protects the store, which serves all ranks."""
FAILURE_REASON_SECONDS = 2.0
"""Seconds to wait for the status of a failed rank after a collective has failed."""

CALLS = "calls"
TICKS = "ticks"

_FAILED_KEY = "failed"
_ABORT_KEY = "abort"


class _Call(NamedTuple):
    """A collective that this rank waits in."""

    what: str
    site: str
    channel: str
    number: int


class CollectiveWatchdog:
    """Numbers this rank's collectives per channel, and watches the rank while it waits in them.

    A channel is a sequence of collectives that every rank runs in the same order: the script's calls (``CALLS``), and
    the stop agreement's reductions (``TICKS``). Every collective involves all ranks; the deadlock detection relies on
    this.
    """

    def __init__(self, *, rank: int, world_size: int, store: Any, timeout_seconds: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        """Timeout of the script's collectives."""
        self.control_timeout_seconds = 60.0
        """How long a rank that has run out of memory waits for the other ranks, in place of ``timeout_seconds``."""
        self.entered: Counter[str] = Counter()
        self.failure: str | None = None
        """Why no further collective is possible; None if collectives are still possible."""
        self.waits_in: str | None = None
        """Name of the call that this rank has been waiting in for a while, or None. Read by the heartbeat."""
        self.left_at: str | None = None
        """``file:line`` where this rank left its training loop early; else None."""
        self.end_barrier = EndBarrier(store, rank=rank, world_size=world_size, failure_keys=(_FAILED_KEY, _ABORT_KEY))
        self._store = store
        self._patience = float(os.environ.get("HPCACCEL_PATIENCE_SECONDS", PATIENCE_SECONDS))
        self._next_polled = rank + 1

    def enter(self, channel: str = CALLS) -> int:
        """Count this rank's next collective on the channel, and return the collective's number.

        Raises:
            RuntimeMisuse: an earlier collective failed, after which the ranks' call numbers may differ.
        """
        if self.failure is not None:
            raise RuntimeMisuse(
                f"an earlier collective call failed, so no further collective call is possible: {self.failure}"
            )
        self.entered[channel] += 1
        return self.entered[channel]

    def wait(self, work: Any, what: str, *, channel: str = CALLS, number: int, limit: float | None = None) -> None:
        """Wait until the asynchronous collective ``work`` is done.

        Args:
            what: name of the call in the script, for messages.
            number: the number that ``enter`` returned for this collective.
            limit: timeout in seconds; default: ``timeout_seconds``.

        Raises:
            RuntimeMisuse: some ranks cannot take part any more, or have not taken part within ``limit`` seconds.
            RankFailed: another rank has failed, or the connection to another rank was lost.
        """
        limit = self.timeout_seconds if limit is None else limit
        try:
            if not _is_done(work, min(self._patience, limit)):
                self._wait_and_poll(work, _Call(what, call_site(), channel, number), limit)
            return
        except RuntimeError as error:
            failure = str(error)
        self._raise_lost_connection(what, failure)

    def publish_departure(self, reason: str) -> None:
        """Publish that this rank makes no further calls, with the reason."""
        self._publish({"departure": reason})

    def publish_failure(self, reason: str) -> None:
        """Publish that this rank has failed."""
        self.publish_departure(f"has failed {reason}")
        try:
            self._store.set(_FAILED_KEY, str(self.rank))
        except RuntimeError:
            pass  # the store's host is gone

    def publish_end(self) -> None:
        """Publish that this rank has reached the end of the program."""
        left = "" if self.left_at is None else f" (it left its loop at {self.left_at})"
        self.publish_departure(f"has reached the end of the program{left}")

    def withdraw_departure(self) -> None:
        """Publish that this rank takes part in calls again."""
        self._publish({})

    def ranks_at_end(self) -> list[str]:
        """One line of text for each rank, except this one, that has reached the end of the program."""
        departures = [(rank, str(status.get("departure", ""))) for rank, status in self._statuses(self._other_ranks())]
        return [f"rank {rank} {reason}" for rank, reason in departures if reason.startswith("has reached")]

    def abort_message(self) -> str | None:
        """The reason stored by the rank that aborted; None if no rank has aborted or the store is gone."""
        try:
            if self._store.check([_ABORT_KEY]):
                return str(json.loads(self._store.get(_ABORT_KEY))["text"])
        except RuntimeError:
            pass  # the store's host is gone
        return None

    def abort(self, text: str, kind: type[Exception] = RuntimeMisuse) -> NoReturn:
        """Store ``text`` as the reason for the other ranks to abort, and raise ``kind(text)``. After that, no further
        collective is possible."""
        self.failure = text
        try:
            self._store.compare_set(_ABORT_KEY, "", json.dumps({"text": text, "failed": kind is RankFailed}))
        except RuntimeError:
            pass  # the store's host is gone
        keep_groups()
        raise kind(text)

    def _wait_and_poll(self, work: Any, call: _Call, limit: float) -> None:
        started = time.monotonic() - min(self._patience, limit)
        warned = False
        self._publish(call._asdict())
        self.waits_in = call.what
        try:
            while not _is_done(work, min(POLL_SECONDS, self._patience)):
                waited = time.monotonic() - started
                self._abort_if_hopeless(call)
                if waited >= limit:
                    self.abort(f"{self._missing_text(call, limit)} and reached the time limit. {_ADVICE}")
                if waited >= WARNING_SECONDS and not warned:
                    warned = True
                    limit_text = f"The time limit is {limit:.0f} s"
                    print(f"hpcaccel: {self._missing_text(call, waited)}. {limit_text}", file=sys.stderr, flush=True)
        finally:
            self.waits_in = None
            self._publish({})

    # -- the other ranks' status ------------------------------------------------------------------------------------

    def _abort_if_hopeless(self, call: _Call) -> None:
        """Abort if the call cannot complete.

        Raises:
            RuntimeMisuse: a rank that this call waits for makes no further calls; there is a deadlock; or another rank
                has aborted.
            RankFailed: a rank that this call waits for has failed, or another rank has aborted for that reason.
        """
        self._join_abort(call.what, call.site)
        for rank, status in self._statuses(self._polled_ranks()):
            if status["entered"].get(call.channel, 0) >= call.number:
                continue
            text = f"rank {self.rank} is waiting in {call.what} at {call.site} for rank {rank}, which"
            reason = status.get("departure")
            if reason is not None:
                if reason.startswith("has failed"):
                    self.abort(f"{text} {reason}", kind=RankFailed)
                self.abort(f"{text} {reason} without making this call. {_ADVICE}")
            if status.get("number") and self.entered[status["channel"]] < status["number"]:
                other = f"is waiting in {status['what']} at {status['site']} for rank {self.rank}"
                self.abort(f"{text} {other}: a deadlock. {_ADVICE}")

    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _polled_ranks(self) -> list[int]:
        """The other ranks to poll next: at most ``RANKS_PER_POLL``, taken in turn."""
        count = min(RANKS_PER_POLL, self.world_size)
        first, self._next_polled = self._next_polled, self._next_polled + count
        ranks = ((first + step) % self.world_size for step in range(count))
        return [rank for rank in ranks if rank != self.rank]

    def _statuses(self, ranks: Iterable[int]) -> list[tuple[int, dict[str, Any]]]:
        """Pairs (rank, status) for those of ``ranks`` that have published a status; incomplete if the store becomes
        unreachable."""
        found = []
        try:
            for rank in ranks:
                if self._store.check([f"status/{rank}"]):
                    found.append((rank, json.loads(self._store.get(f"status/{rank}"))))
        except RuntimeError:
            pass  # the store's host is gone; the collective itself will fail
        return found

    def _publish(self, status: dict[str, Any]) -> None:
        try:
            self._store.set(f"status/{self.rank}", json.dumps({"entered": dict(self.entered), **status}))
        except RuntimeError:
            pass  # the store's host is gone

    def _join_abort(self, what: str, site: str) -> None:
        """Abort if another rank has aborted.

        Raises:
            RuntimeMisuse, RankFailed: another rank has aborted.
        """
        try:
            if not self._store.check([_ABORT_KEY]):
                return
            abort = json.loads(self._store.get(_ABORT_KEY))
        except RuntimeError:
            return  # the store's host is gone
        text = f"rank {self.rank} is waiting in {what} at {site}. {abort['text']}"
        self.abort(text, kind=RankFailed if abort["failed"] else RuntimeMisuse)

    def _raise_lost_connection(self, what: str, failure: str) -> NoReturn:
        """Raise the error for a failed collective. The message includes the failed rank and its reason if that rank has
        published one."""
        site = call_site()
        short = re.sub(r"^\[[^]]*\] *", "", failure.strip().partition("\n")[0]).partition(". ")[0]
        deadline = time.monotonic() + FAILURE_REASON_SECONDS
        while time.monotonic() < deadline:
            self._join_abort(what, site)
            for rank, status in self._statuses(range(self.world_size)):
                if "departure" in status:
                    text = f"rank {self.rank} waited in {what} at {site} for rank {rank}, which {status['departure']}"
                    self.abort(f"{text} ({short})", kind=RankFailed)
            time.sleep(0.1)
        self.abort(
            f"{what} at {site} failed on rank {self.rank}: the connection to another rank was lost ({short})",
            kind=RankFailed,
        )

    def _missing_text(self, call: _Call, waited: float) -> str:
        others = self._other_ranks()
        present = {
            rank for rank, status in self._statuses(others) if status["entered"].get(call.channel, 0) >= call.number
        }
        missing = [rank for rank in others if rank not in present]
        whom = f"{ranks_text(missing)} of {self.world_size}" if missing else "data from the other ranks"
        return f"rank {self.rank} has waited {waited:.0f} s in {call.what} at {call.site} for {whom}"


_ADVICE = "All ranks must make the same calls in the same order: check whether one is inside `if is_main_process:`"


def _is_done(work: Any, seconds: float) -> bool:
    """Wait up to ``seconds`` for a collective. Returns whether it has completed.

    Raises:
        RuntimeError: the collective has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises if the collective failed; returns if it completed in the meantime
    return True
