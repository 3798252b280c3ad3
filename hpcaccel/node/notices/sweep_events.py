"""The events of a sweep as notices, derived from its workers' accounts: the start, failed trials, and the end.

Failed trials are summarised: a notice at the first, second, fourth, eighth … failure, and the totals at the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.formatting import counted
from hpcaccel.core.notice_message import Notice
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.records import from_dict
from hpcaccel.core.sweep_dir import SweepDir

__all__ = ["SweepEvents"]

GONE_SECONDS = 600.0
"""A worker whose account has no new line for this time is gone: a living one writes a line at least every minute."""


@dataclass
class _Account:
    """The part of a worker's account that has been read so far."""

    path: Path
    offset: int = 0
    first_start: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    """The last line that is a start or an end."""
    seen: float = 0.0
    trials: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The end of each trial that ended in this worker, by number."""

    def read(self) -> None:
        for line, position in read_lines(self.path, offset=self.offset):
            self.offset = position
            self.seen = float(line.get("time", 0.0))
            if line.get("event") in ("start", "end"):
                self.last = line
                self.first_start = self.first_start or line
            elif line.get("what") == "ended" and line.get("reason"):
                self.trials[int(line["trial"])] = line

    def is_active(self, now: float) -> bool:
        """Whether the worker runs, or will run again after a requeue."""
        if self.last is None:
            return False
        if self.last["event"] == "end":
            return self.last.get("decision") == "requeue"
        return now - self.seen < GONE_SECONDS


class SweepEvents:
    """Notices about ``sweep``.

    Args:
        events: the events that the user wants.
    """

    def __init__(self, sweep: SweepDir, events: Collection[str]) -> None:
        self._sweep, self._events = sweep, frozenset(events)
        spec = (read_json(sweep.spec) or {}).get("spec") or {}
        self._name = str(spec.get("name") or sweep.path.parent.name)
        self._accounts: dict[int, _Account] = {}

    def notices(self) -> list[Notice]:
        """The notices of all events so far.

        Raises:
            OSError: a file cannot be read.
        """
        for index in self._sweep.worker_indices():
            account = self._accounts.setdefault(index, _Account(self._sweep.worker(index).account))
            account.read()
        found = [*self._start(), *self._failures(), *self._end()]
        return [notice for notice in found if notice.event in self._events]

    def idle_gpus(self, known: object) -> list[Notice]:
        """Always empty: notices about idle GPUs exist for single runs only."""
        return []

    def _start(self) -> Iterator[Notice]:
        starts = [one.first_start for one in self._accounts.values() if one.first_start is not None]
        if starts:
            first = min(starts, key=lambda line: float(line["time"]))
            yield self._notice(
                "start", "start", f"sweep {self._name} started", moment=first["time"], job=first.get("job_id", "")
            )

    def _failures(self) -> Iterator[Notice]:
        ends = sorted(self._ends().values(), key=lambda line: float(line["time"]))
        failed = [line for line in ends if line["reason"] == "failed" and line.get("decision") == "end"]
        number = 1
        while number <= len(failed):
            line = failed[number - 1]
            yield self._notice(
                "failure",
                f"failures.{number}",
                f"sweep {self._name}: {counted(number, 'trial')} failed",
                moment=line["time"],
                reason="failed",
                detail=f"last: trial {line['trial']}: {line.get('detail') or 'unknown cause'}",
                advice=f"hpcaccel sweep table {self._sweep.run_id} lists the trials",
            )
            number *= 2

    def _end(self) -> Iterator[Notice]:
        now = time.time()
        over = [one.last for one in self._accounts.values() if one.last is not None and one.last["event"] == "end"]
        if not over or any(one.is_active(now) for one in self._accounts.values()):
            return
        last = max(over, key=lambda line: float(line["time"]))
        reasons = {line.get("reason") for line in over}
        reason = "completed" if reasons <= {"completed"} else str(last.get("reason"))
        yield self._ended(reason, str(last.get("decision") or ""), float(last["time"]))

    def _ended(self, reason: str, decision: str, moment: float, detail: str = "") -> Notice:
        ends = self._ends()
        counts = Counter(str(line["reason"]).replace("_", " ") for line in ends.values())
        totals = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
        return self._notice(
            "stop" if decision == "pause" else "end",
            f"end.{len(ends)}",  # the same if a late worker finds nothing to do; another one after an extension
            f"sweep {self._name} ended: {reason.replace('_', ' ')}",
            moment=moment,
            reason=reason,
            decision=decision,
            detail="; ".join(part for part in (f"trials: {totals or 'none'}", detail) if part),
        )

    def _ends(self) -> dict[int, dict[str, Any]]:
        """The newest end of each trial."""
        found: dict[int, dict[str, Any]] = {}
        for account in self._accounts.values():
            for number, line in account.trials.items():
                if number not in found or float(line["time"]) > float(found[number]["time"]):
                    found[number] = line
        return found

    def _notice(self, event: str, key: str, text: str, *, moment: float, **values: Any) -> Notice:
        common = {"run": self._sweep.run_id, "name": self._name, "host": node_name()}
        return from_dict(Notice, {"event": event, "key": key, "text": text, "time": moment, **common, **values})
