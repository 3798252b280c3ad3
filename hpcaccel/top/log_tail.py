"""The end of a run's log, read again only where it has grown."""

from __future__ import annotations

import re
from pathlib import Path

from hpcaccel.core.formatting import clean
from hpcaccel.core.run_dir import RunDir, numbered_folders
from hpcaccel.view.merged_log import merged_log

__all__ = ["MERGED", "LogTail", "shown_line"]

MERGED = "all ranks"
FIRST_BYTES = 64 << 10
"""A file is first read from this many bytes before its end."""
MOST_BYTES = 1 << 20
"""At most this many new bytes are shown at once: a program that writes faster loses lines on the screen only."""
MERGED_LINES = 500
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]")


class LogTail:
    """Follows one source of a run: a rank, all ranks merged by time, the supervisor, or the batch script.

    Args:
        source: one of ``sources``.
    """

    def __init__(self, run: RunDir, source: str = "rank 0") -> None:
        self._run = run
        self.source = source
        self._path: Path | None = None
        self._offset = 0
        self._rest = b""
        self._seen: tuple[tuple[str, int, int], ...] = ()

    @staticmethod
    def sources(failed_rank: int | None = None) -> list[str]:
        """The sources, the usual one first; with the rank that failed first, if there is one."""
        ranks = ["rank 0", *([f"rank {failed_rank}"] if failed_rank else [])]
        return [*ranks, MERGED, "supervisor", "batch script"]

    def new(self) -> tuple[bool, list[str]]:
        """Lines to show.

        Returns:
            Whether they replace the lines of earlier calls, and the lines.
        """
        if self.source == MERGED:
            return self._merged()
        path = self._file()
        fresh = path != self._path
        if fresh:
            self._path, self._offset, self._rest = path, 0, b""
        if path is None:
            return fresh, []
        try:
            with path.open("rb") as file:
                end = file.seek(0, 2)
                if end < self._offset:  # the file was replaced
                    fresh, self._offset, self._rest = True, 0, b""
                skipped = end - self._offset > (FIRST_BYTES if fresh else MOST_BYTES)
                start = end - FIRST_BYTES if skipped else self._offset
                file.seek(start)
                data = (b"" if skipped else self._rest) + file.read(end - start)
        except FileNotFoundError:
            return fresh, []
        self._offset = end
        if skipped:
            data = data.partition(b"\n")[2]
        whole, newline, self._rest = data.rpartition(b"\n")
        return fresh, whole.decode(errors="replace").split("\n") if newline else []

    def _newest(self) -> int:
        return max(numbered_folders(self._run.attempts), default=0)

    def _file(self) -> Path | None:
        if self.source == "batch script":
            return self._run.slurm_log
        attempt = self._newest()
        if not attempt:
            return None
        if self.source == "supervisor":
            return self._run.supervisor_log(attempt)
        return self._run.rank_log(attempt, self.source.removeprefix("rank "))

    def _merged(self) -> tuple[bool, list[str]]:
        attempt = self._newest()
        stats = ((path, path.stat()) for path in sorted(self._run.attempt(attempt).glob("*.log")))
        seen = tuple((path.name, one.st_size, one.st_mtime_ns) for path, one in stats)
        if seen == self._seen:
            return False, []
        self._seen = seen
        lines = merged_log(self._run, attempt or None, limit=MERGED_LINES)
        return True, [f"{_who(line.sources)} {line.text}" for line in lines]


def _who(sources: list[str]) -> str:
    return f"[{sources[0]}]" if len(sources) == 1 else f"[{sources[0]} and {len(sources) - 1} more]"


def shown_line(line: str) -> str:
    """A line of a log without escape sequences; of a progress bar that overwrites itself, its last state."""
    return clean(_ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).expandtabs(8))
