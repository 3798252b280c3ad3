"""Whether the run directory takes what the ranks will write. All nodes share it, so that no node is to blame.

Looked at by the batch step alone, before the ranks start; somebody may make room within some minutes.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.core.run_dir import MOVED, RunDir
from hpcaccel.node import retry_io
from hpcaccel.node.failures.causes import cause
from hpcaccel.node.failures.classify import Failure

__all__ = ["LEAST_BYTES", "SHORT_OF_ROOM", "Shortage", "WaitForRoom", "bytes_to_save", "explained_by_room", "shortage"]

LEAST_BYTES = 16 << 20
SHORT_OF_ROOM = ("disk_full", "quota", "unwritable", "io_error")
"""Causes that somebody may mend while the batch step waits."""
_SAYS_LITTLE = ("launch", "exit", "killed")
"""Causes that a full disk may be behind: what would say so could not be written."""
_NEEDS = re.compile(r"\bneeds ([\d,]+) bytes")
_CAUSES = {errno.ENOSPC: "disk_full", errno.EDQUOT: "quota", errno.EIO: "io_error", errno.ESTALE: "io_error"}


@dataclass(frozen=True)
class Shortage:
    cause: str
    """Names a row of the causes."""
    text: str

    def failure(self, said: str = "") -> Failure:
        return Failure(cause=cause(self.cause), detail=f"{said}; {self.text}" if said else self.text)


def shortage(run: RunDir, *, needed: int = LEAST_BYTES, to_save: int = 0) -> Shortage | None:
    """Why nothing can be written to the run directory or its checkpoints, or less than is needed.

    Args:
        needed: bytes that must be free where the run directory lies.
        to_save: bytes that must be free where its checkpoints lie, which may be another file system.
    """
    if not run.path.is_dir():
        return Shortage("run_directory_gone", f"{MOVED}: {run.path}")
    found = _in_folder(run.path, needed)
    return _in_folder(run.checkpoints, to_save) if found is None and run.checkpoints.is_dir() else found


def _in_folder(folder: Path, needed: int) -> Shortage | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(4096))
            file.flush()
            retry_io.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        kind = _CAUSES.get(error.errno or 0, "unwritable")
        text = f"cannot write to {folder}: {error.strerror}"
        return Shortage(kind, f"{text}; {_figures(folder, needed)}" if kind in ("disk_full", "quota") else text)
    if free >= needed:
        return None
    return Shortage("disk_full", f"the file system of {folder} is full; {_figures(folder, needed)}")


def _figures(folder: Path, needed: int) -> str:
    try:
        return f"it needs {needed:,} bytes, {shutil.disk_usage(folder).free:,} are free"
    except OSError:
        return f"it needs {needed:,} bytes"


def bytes_to_save(run: RunDir, said: str) -> int:
    """How much must be free before the ranks start again after a failure: as much as the save that failed ``said``, or
    the newest checkpoint holds."""
    needs = sum(int(number.replace(",", "")) for number in _NEEDS.findall(said))
    newest = checkpoint_files.newest(run.checkpoints)
    return max(needs, 0 if newest is None else int(newest.manifest.get("bytes", 0)))


def explained_by_room(run: RunDir, failure: Failure) -> Failure:
    """``failure``, or what the run directory says where the logs could say little, with the bytes that are missing.

    The disk that was full may be another one, which nobody can look at here: then nothing is missing.
    """
    may_be_elsewhere = failure.cause.name in ("exception", "io_error") and cause("unwritable").in_error(failure.detail)
    if failure.cause.name in _SAYS_LITTLE or may_be_elsewhere:
        found = shortage(run, needed=4096)
        return failure if found is None else found.failure(failure.detail)
    if failure.cause.name != "disk_full" or _NEEDS.search(failure.detail):
        return failure
    folder = run.checkpoints if run.checkpoints.is_dir() else run.path
    needed = max(LEAST_BYTES, bytes_to_save(run, ""))
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return failure
    if free >= needed:
        return failure
    return dataclasses.replace(failure, detail=f"{failure.detail}; {folder} needs {needed:,} bytes, {free:,} are free")


class WaitForRoom:
    """As long as something is missing: to be watched as ranks are. Its code is 0 once nothing is."""

    def __init__(self, look: Callable[[], Shortage | None]) -> None:
        self._look = look
        self._until = time.monotonic() + retry_io.PATIENCE_SECONDS
        self._asked = False
        self.missing = look()

    def poll(self) -> int | None:
        if self._asked:
            return 1
        self.missing = self._look()
        if self.missing is None:
            return 0
        return 1 if time.monotonic() > self._until else None

    def ask(self) -> None:
        self._asked = True

    def kill(self) -> None:
        self._asked = True

    def dump(self) -> None:
        pass

    def wake(self) -> None:
        pass
