"""The outbox ``notices.jsonl`` of a run or a sweep: what was to be sent, what was tried, and what was delivered.

Lines by ``state``: ``opened`` (events before this time are not sent), then for each notice ``intent`` with the notice,
``trying`` before each request, and after it ``delivered`` with the receiver's answer, ``failed``, or ``given_up``. All
lines are on the disk (fsync) before the next step. ``settled``: all were tried after the run's end. If
``trying`` is the last line of a notice, its sender was killed while it waited for the answer or before it could record
it: the receiver may have the message already. The notice is then sent again, marked as repeated and under the same ID.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import FILE_MODE, append_line, lock_file, read_lines
from hpcaccel.core.notice_message import END_EVENTS, OUTBOX, Notice
from hpcaccel.core.records import from_dict

__all__ = ["Outbox"]

MOST_TRIES = 8
"""A notice is given up after this number of requests without success."""


class Outbox:
    """The outbox in ``folder``. Only the process that holds its lock sends.

    Args:
        since: if the outbox is new: time from which on events are sent (seconds since the epoch). A run that gets its
            webhook later does not send its whole history.
    """

    def __init__(self, folder: Path, *, since: float) -> None:
        self.path = folder / OUTBOX
        self.since = since
        self.notices: dict[str, Notice] = {}
        """All notices so far, by key."""
        self._states: dict[str, str] = {}
        self._tries: dict[str, int] = {}
        self._unwritten: list[dict[str, Any]] = []
        self._lock: int | None = None

    def acquire(self) -> bool:
        """Lock the outbox, and read it. False if another process holds the lock."""
        if self._lock is not None:
            return True
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE_MODE)
        if lock_file(fd, wait=False) == "busy":
            os.close(fd)
            return False
        self._lock = fd
        opened = False
        for line, _ in read_lines(self.path):
            opened |= line.get("state") == "opened"
            self._apply(line)
        if not opened:
            self._write({"state": "opened", "since": self.since})
        return True

    def _apply(self, line: Mapping[str, Any]) -> None:
        state, key = line.get("state"), line.get("key")
        if state == "opened":
            self.since = float(line["since"])
        elif isinstance(key, str):
            if state == "intent":
                self.notices[key] = from_dict(Notice, dict(line["notice"]))
            if state == "trying":
                self._tries[key] = self._tries.get(key, 0) + 1
            self._states[key] = str(state)

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line. Raises OSError if it is not on the disk."""
        append_line(self.path, {"time": round(time.time(), 3), **line}, sync=True)
        self._apply(line)

    # -- notices --------------------------------------------------------------------------------------------------

    def add(self, notice: Notice) -> None:
        """Record the intent to send ``notice``, unless its key is known or it is older than the outbox.

        An attempt has one end: if its notice was added before the ledger had a line about it, no second one is added.
        """
        if notice.key not in self.notices and notice.time >= self.since and not self._knows_end_of(notice):
            self._write({"state": "intent", "key": notice.key, "notice": asdict(notice)})

    def _knows_end_of(self, notice: Notice) -> bool:
        attempt, _, event = notice.key.partition(".")
        return event in END_EVENTS and any(f"{attempt}.{one}" in self.notices for one in END_EVENTS)

    def settle(self, ledger_bytes: int) -> None:
        """Record that everything up to this size of the ledger, or of a sweep's accounts, was tried after the end."""
        self._write({"state": "settled", "ledger_bytes": ledger_bytes})

    def release(self) -> None:
        """Release the lock: another process may send from now on."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def held(self) -> bool:
        """Whether this process has the lock."""
        return self._lock is not None

    def pending(self) -> list[Notice]:
        """Notices that are neither delivered nor given up, oldest first."""
        return [one for key, one in self.notices.items() if self._states[key] not in ("delivered", "given_up")]

    def is_uncertain(self, notice: Notice) -> bool:
        """Whether an earlier request with ``notice`` may have reached the receiver."""
        return self._states[notice.key] == "trying"

    def tries(self, notice: Notice) -> int:
        """How many requests with ``notice`` have been started."""
        return self._tries.get(notice.key, 0)

    def trying(self, notice: Notice) -> None:
        """Record that a request begins now. Raises OSError if that cannot be recorded: then nothing may be sent."""
        self._write({"state": "trying", "key": notice.key})

    def result(self, notice: Notice, *, delivered: bool, final: bool, status: int | None, answer: str) -> None:
        """Record the result of a request. If the disk is full, the line is written later."""
        state = "delivered" if delivered else "failed"
        if not delivered and (final or self.tries(notice) >= MOST_TRIES):
            state = "given_up"
        line = {"state": state, "key": notice.key, "status": status, "answer": answer}
        self._apply(line)
        self._unwritten.append({"time": round(time.time(), 3), **line})
        self.flush()

    def flush(self) -> None:
        """Write the results that could not be written so far."""
        while self._unwritten:
            try:
                append_line(self.path, self._unwritten[0], sync=True)
            except OSError:
                return
            del self._unwritten[0]
