"""Reader of a run's ledger, ``attempts.jsonl``: one line when an attempt starts and one when it ends.

``hpcaccel.node.ledger`` writes the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.records import AttemptEnd, AttemptStart, from_dict
from hpcaccel.core.run_dir import RunDir

__all__ = ["RunLedger"]


@dataclass
class RunLedger:
    """Start and end lines of a run's attempts, in the order of the file."""

    starts: list[AttemptStart] = field(default_factory=list)
    ends: list[AttemptEnd] = field(default_factory=list)
    last: AttemptStart | AttemptEnd | None = None
    """The newest line."""

    @classmethod
    def read(cls, run: RunDir, *, offset: int = 0) -> RunLedger:
        """Read the ledger of ``run``.

        Args:
            offset: number of bytes to skip; ``RunRecord.ledger_offset`` skips the lines of jobs before the newest one.
        """
        found = cls()
        found.read_lines(run.ledger, offset=offset)
        return found

    def read_lines(self, path: Path, *, offset: int = 0) -> None:
        """Add the lines of ``path`` from byte ``offset`` on."""
        for line, _ in read_lines(path, offset=offset):
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line of the file. Lines of other kinds are skipped."""
        if line.get("event") == "start":
            self.last = from_dict(AttemptStart, dict(line))
            self.starts.append(self.last)
        elif line.get("event") == "end":
            self.last = from_dict(AttemptEnd, dict(line))
            self.ends.append(self.last)

    @property
    def attempts(self) -> list[int]:
        """Numbers of all attempts, ascending."""
        return sorted({*(line.attempt for line in self.starts), *(line.attempt for line in self.ends)})

    @property
    def next_attempt(self) -> int:
        return 1 + max(self.attempts, default=0)

    @property
    def restarts(self) -> int:
        """Number of attempts that followed another one inside the same allocation."""
        return sum(line.decision == "restart" for line in self.ends)

    def start_of(self, attempt: int) -> AttemptStart | None:
        return next((line for line in reversed(self.starts) if line.attempt == attempt), None)

    def end_of(self, attempt: int) -> AttemptEnd | None:
        return next((line for line in reversed(self.ends) if line.attempt == attempt), None)

    def unfinished(self) -> AttemptStart | None:
        """The last attempt if it has no end line: it is running, or its batch step was killed."""
        if self.starts and self.end_of(self.starts[-1].attempt) is None:
            return self.starts[-1]
        return None

    @property
    def final_end(self) -> AttemptEnd | None:
        """The newest end line if it ends or pauses the run, so that the run does not continue by itself; else None."""
        return self.ends[-1] if self.ends and self.ends[-1].decision in ("end", "pause") else None

    @property
    def settled(self) -> AttemptEnd | None:
        """:attr:`final_end` if no attempt has started since then; else None."""
        return self.final_end if self.last is not None and self.last is self.final_end else None

    def ended_by(self, job_id: str) -> AttemptEnd | None:
        """The end line with which this job ended or paused the run; None if there is none."""
        if self.final_end is None or self.unfinished() is not None:
            return None
        last = self.final_end
        own = {line.attempt for line in self.starts if line.job_id == job_id}
        return last if last.job_id == job_id or last.attempt in own else None

    def ends_of(self, jobs: Collection[str]) -> list[AttemptEnd]:
        """End lines of attempts that ``jobs`` started. Caps count these lines for the jobs since the newest submission:
        `hpcaccel resume`, which submits a new job, resets the counts."""
        own = {line.attempt for line in self.starts if line.job_id in jobs}
        return [line for line in self.ends if line.attempt in own]
