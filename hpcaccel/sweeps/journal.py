"""The journal as Optuna sees it: ``optuna.storages.JournalStorage(Journal(path))``.

Optuna keeps a study as a list of operations that every process replays in the order of the file. A trial's number is
the count of "create trial" operations before it, so that all processes must see the same operations, and no others:
lines that do not count are passed over by all of them alike. A process learns the number of a trial that it has made
by reading its own operation back; one whose operation did not count was killed, or was told so by an exception,
before it could use a number. Lines ``{"hpcaccel": kind, …}`` are ours and hidden from Optuna.

Optuna's own backend raises ``JSONDecodeError`` for ever once a line is torn, and after a kill with the lock held makes
everybody wait for 30 seconds.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from typing import Any

from optuna.storages.journal import BaseJournalBackend
from optuna.trial import TrialState

from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.journal_lock import PATIENCE_SECONDS

__all__ = ["Journal"]

FINISHED = frozenset(state.value for state in TrialState if state.is_finished())


class Journal(BaseJournalBackend):
    """Optuna's operations in a ``JournalFile``.

    Args:
        path: ``journal.jsonl`` of the sweep's directory; made by the first operation.
        patience_seconds: see ``JournalFile``.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.file = JournalFile(path, patience_seconds=patience_seconds)
        self._offsets = array("Q", [0])
        """Where to begin to read for each operation by its number; the last one is of the operation to come."""

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.file.path, "patience_seconds": self.file.patience_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def note(self, kind: str, **fields: Any) -> None:
        """Append a line of our own, which Optuna does not see.

        Raises:
            RunDirectoryError: see ``JournalFile.append``.
        """
        self.file.append([{"hpcaccel": kind, **fields}])

    def sync(self) -> None:
        """Let everything up to here survive a power cut; what tells a finished trial does so by itself."""
        self.file.sync()

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.file.append(logs, sync=any(log.get("state") in FINISHED for log in logs))

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        number = min(log_number_from, len(self._offsets) - 1)
        for line, behind in self.file.lines(self._offsets[number]):
            operation = _decoded(line)
            if operation is None:
                continue  # not yet behind it: a bad last line may be one that NFS shows us too early
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
