"""Optuna's storage backend on the journal: ``optuna.storages.JournalStorage(Journal(path))``.

Optuna stores a study as a list of operations that every process replays in file order. A trial's number is the count of
"create trial" operations before it, so all processes must see exactly the same operations and skip the same
invalid lines. A process gets the number of its new trial by reading its own operation back; a process whose operation
does not count was killed, or got an exception, before it could use a number. Lines ``{"hpcaccel": kind, …}`` belong to
hpcaccel and are hidden from Optuna.

Optuna's own backend raises ``JSONDecodeError`` on every read once a line is torn, and makes all processes wait for 30
seconds after one of them is killed while it holds the lock.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from typing import Any

from optuna.storages.journal import BaseJournalBackend
from optuna.trial import TrialState

from hpcaccel.sweeps.journal_file import PATIENCE_SECONDS, JournalFile

__all__ = ["Journal"]

FINISHED = frozenset(state.value for state in TrialState if state.is_finished())


class Journal(BaseJournalBackend):
    """Optuna's operations in a ``JournalFile``.

    Args:
        path: ``journal.jsonl`` of the sweep's directory; created by the first operation.
        patience_seconds: see ``JournalFile``.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.file = JournalFile(path, patience_seconds=patience_seconds)
        self._offsets = array("Q", [0])
        """Byte offset of each operation, by its number; the last entry is where to look for the next operation."""

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.file.path, "patience_seconds": self.file.patience_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def note(self, kind: str, **fields: Any) -> None:
        """Append an hpcaccel line, which is hidden from Optuna.

        Raises:
            RunDirectoryError: see ``JournalFile.append``.
        """
        self.file.append([{"hpcaccel": kind, **fields}])

    def sync(self) -> None:
        """Flush this process's operations to disk. Operations that finish a trial are flushed without this call."""
        self.file.sync()

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.file.append(logs, sync=any(log.get("state") in FINISHED for log in logs))

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        number = min(log_number_from, len(self._offsets) - 1)
        for line, behind in self.file.lines(self._offsets[number]):
            operation = _decoded(line)
            if operation is None:
                continue  # keep the offset before this line: NFS may show the last line before it is complete
            if "op_code" not in operation:
                self._goes_on_at(number, behind)
                continue
            number += 1
            self._goes_on_at(number, behind)
            if number > log_number_from:
                yield operation

    def _goes_on_at(self, number: int, offset: int) -> None:
        if number == len(self._offsets):
            self._offsets.append(offset)
        else:
            self._offsets[number] = offset


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
