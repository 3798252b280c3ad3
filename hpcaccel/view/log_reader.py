"""Reads the log files of a run's ranks, whole or as they grow, one attempt after another."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import UserError

__all__ = ["Logs", "copy_logs"]

LOOK_SECONDS = 0.5
CHUNK_BYTES = 1 << 20


class Logs:
    """Selected log files of a run, read incrementally, as bytes.

    Args:
        rank: a rank's number, ``all`` (each line then begins with ``[rank]``), ``supervisor``, ``batch`` (output of
            the batch script itself), or a component's name (lines begin with ``[name-process]``).
        attempt: read only this attempt; None to read the newest attempt and all that start later.

    Raises:
        UserError: ``rank`` is not one of these.
    """

    def __init__(self, run: RunDir, *, rank: str = "0", attempt: int | None = None) -> None:
        components = _components(run)
        self._component = rank if rank in components else None
        words = ["all", "supervisor", "batch", *components]
        if rank not in words and not rank.isdecimal():
            *names, last = map(repr, words)
            raise UserError(f"--rank {rank!r} is not a rank: use a number, {', '.join(names)} or {last}")
        self.run = run
        self.rank = rank
        self.attempt = attempt
        self._first = attempt if attempt is not None else max(self.attempts(), default=1)
        self._offsets: dict[Path, int] = {}

    def position(self) -> dict[str, Any]:
        """The position after the last line read, for :meth:`go_on` in another process."""
        return {"first": self._first, "offsets": {str(path): offset for path, offset in self._offsets.items()}}

    def go_on(self, position: Mapping[str, Any]) -> None:
        """Continue after ``position``: do not read earlier lines."""
        self._first = int(position["first"])
        self._offsets = {Path(path): int(offset) for path, offset in position["offsets"].items()}

    def attempts(self) -> list[int]:
        """Numbers of the attempts that have a folder, oldest first."""
        try:
            return sorted(int(path.name) for path in self.run.attempts.iterdir() if path.name.isdecimal())
        except FileNotFoundError:
            return []

    def files(self) -> list[Path]:
        """The log files that exist, in the order in which they are read."""
        if self.rank == "batch":
            return [path for path in (self.run.slurm_log,) if path.exists()]
        wanted = [n for n in self.attempts() if (n == self.attempt if self.attempt is not None else n >= self._first)]
        return [path for number in wanted for path in self._files_of(number)]

    def _files_of(self, attempt: int) -> list[Path]:
        folder = self.run.attempt(attempt)
        if self.rank == "all":
            found = [path for path in folder.glob("*.log") if path.stem.isdecimal()]
            return sorted(found, key=lambda path: int(path.stem))
        if self._component is not None:
            found = [
                path for path in folder.glob(f"{self._component}-*.log") if path.stem.rpartition("-")[2].isdecimal()
            ]
            return sorted(found, key=lambda path: int(path.stem.rpartition("-")[2]))
        path = folder / f"{self.rank}.log"
        return [path] if path.exists() else []

    def new(self, *, last: bool = False) -> Iterator[bytes]:
        """Whole lines added since the last call; with ``last``, also an incomplete line at the end of a file."""
        for path in self.files():
            several = self.rank == "all" or self._component is not None
            prefix = f"[{path.stem}] ".encode() if several else b""
            for chunk in self._read(path, last=last):
                yield _prefixed(chunk, prefix) if prefix else chunk

    def _read(self, path: Path, *, last: bool) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            rest = b""
            while piece := file.read(CHUNK_BYTES):
                whole, newline, rest = (rest + piece).rpartition(b"\n")
                self._offsets[path] = file.tell() - len(rest)
                if newline:
                    yield whole + newline
            if rest and last:
                self._offsets[path] = file.tell()
                yield rest


def _components(run: RunDir) -> list[str]:
    launch = find_launch(run)
    return [] if launch is None else [one.name for one in launch.components]


def copy_logs(
    logs: Logs,
    out: BinaryIO,
    *,
    ended: Callable[[], bool] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Write ``logs`` to ``out`` and, if ``ended`` is given, follow the logs until ``ended()`` is true. Returns the
    number of bytes written."""
    written = 0
    while True:
        over = ended is None or ended()
        for chunk in logs.new(last=over):
            out.write(chunk)
            written += len(chunk)
        out.flush()
        if over:
            return written
        sleep(LOOK_SECONDS)


def _prefixed(chunk: bytes, prefix: bytes) -> bytes:
    return b"".join(prefix + line for line in io.BytesIO(chunk))
