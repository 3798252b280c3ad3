"""Full or unreachable disks: retrying writes, and checking for free space before the ranks start.

All nodes share the run directory, so no node is blamed if the run directory's disk is full. Before the ranks start,
the batch step checks this disk and waits up to 10 minutes for space to be freed.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import MOVED
from hpcaccel.core.records import AttemptEnd
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.node.failures import Failure, cause

__all__ = [
    "LEAST_BYTES",
    "PATIENCE_SECONDS",
    "SHORT_OF_ROOM",
    "UNWRITABLE_ERRNOS",
    "DiskShortage",
    "WaitForRoom",
    "bytes_to_save",
    "explained_by_room",
    "fsync",
    "gone",
    "if_possible",
    "retry_until_writable",
    "shortage",
    "wait_before_start",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


PATIENCE_SECONDS = 600.0
"""How long to wait for free space. The nodes are idle during the wait."""
LOOK_SECONDS = 2.0
"""Interval between two tries to write."""
UNWRITABLE_ERRNOS = {
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.EPERM, errno.EACCES,
}  # fmt: skip
"""Errors of a disk that is full, unreachable or not writable. Such a state may pass, so writes are retried."""
_ENDS = {signal.SIGTERM, signal.SIGINT}


def retry_until_writable(write: Callable[[], T], *, run: RunDir) -> T:
    """Retry ``write`` while the disk is full, unreachable or not writable, for up to 10 minutes or until SIGTERM or
    SIGINT is pending. Returns the result of ``write``. The caller must have blocked these signals, and no rank may run.

    Raises:
        RunDirectoryError: the run directory cannot be written, or is gone.
    """
    until = None
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno == errno.ENOENT and not run.path.is_dir():
                raise gone(run) from None
            if error.errno not in UNWRITABLE_ERRNOS:
                raise
            if until is None:
                until = time.monotonic() + PATIENCE_SECONDS
                log.warning(
                    f"cannot write to {run.path}: {os.strerror(error.errno)}. Waiting for up to "
                    f"{PATIENCE_SECONDS / 60:.0f} minutes"
                )
            if time.monotonic() > until or signal.sigpending() & _ENDS:
                raise RunDirectoryError(
                    f"cannot write to {run.path}: {os.strerror(error.errno)}. Once it is writable again, run: "
                    f"hpcaccel resume {run.run_id}"
                ) from error
        time.sleep(LOOK_SECONDS)


def gone(run: RunDir) -> RunDirectoryError:
    """The error to raise for a run directory that no longer exists at its path."""
    return RunDirectoryError(
        f"{MOVED}: {run.path}. This job ends and does not create it again. Move it back, then run: "
        f"hpcaccel resume {run.run_id}"
    )


def fsync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system needs no sync
            raise


def if_possible(write: Callable[[], object]) -> None:
    """Call ``write``, and log an OSError as a warning. For files that the run can do without."""
    try:
        write()
    except OSError as error:
        log.warning(f"cannot write {error.filename or 'to the run directory'}: {error.strerror}")


LEAST_BYTES = 16 << 20
"""Free space that the run directory must have before the ranks start."""
SHORT_OF_ROOM = ("disk_full", "quota", "unwritable", "io_error")
"""Causes after which the next start tests the disk first, and waits if necessary."""
_UNSPECIFIC_CAUSES = ("launch", "exit", "killed")
"""Causes that may hide a full disk, because the message about it could not be written to a log."""
_NEEDS = re.compile(r"\bneeds ([\d,]+) bytes")
"""Matches, in the error message of a save, the number of bytes that the save needed."""
_CAUSES = {errno.ENOSPC: "disk_full", errno.EDQUOT: "quota", errno.EIO: "io_error", errno.ESTALE: "io_error"}


@dataclass(frozen=True)
class DiskShortage:
    cause: str
    """Name of a row in ``CAUSES``."""
    text: str

    def failure(self, detail: str = "") -> Failure:
        """A failure with this shortage as its cause.

        Args:
            detail: detail of an earlier failure that this shortage explains, if there is one.
        """
        return Failure(cause=cause(self.cause), detail=f"{detail}; {self.text}" if detail else self.text)


def shortage(run: RunDir, *, needed: int = LEAST_BYTES, to_save: int = 0) -> DiskShortage | None:
    """Test writing to the run directory and its checkpoints. Returns the problem, or None if both have enough space.

    Args:
        needed: bytes that must be free in the file system of the run directory.
        to_save: bytes that must be free in the file system of the checkpoints, which may differ from that of the run.
    """
    if not run.path.is_dir():
        return DiskShortage("run_directory_gone", f"{MOVED}: {run.path}")
    found = _in_folder(run.path, needed)
    return _in_folder(run.checkpoints, to_save) if found is None and run.checkpoints.is_dir() else found


def _in_folder(folder: Path, needed: int) -> DiskShortage | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(4096))
            file.flush()
            fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        kind = _CAUSES.get(error.errno or 0, "unwritable")
        text = f"cannot write to {folder}: {error.strerror}"
        return DiskShortage(kind, f"{text}; {_figures(folder, needed)}" if kind in ("disk_full", "quota") else text)
    if free >= needed:
        return None
    return DiskShortage("disk_full", f"not enough space on the file system of {folder}; {_figures(folder, needed)}")


def _figures(folder: Path, needed: int) -> str:
    try:
        return f"the run needs {needed:,} bytes there, and {shutil.disk_usage(folder).free:,} are free"
    except OSError:
        return f"the run needs {needed:,} bytes there"


def bytes_to_save(run: RunDir, detail: str) -> int:
    """Number of bytes that must be free before the ranks restart: the size of the newest checkpoint, or the size that
    ``detail`` (the error message of the failed save) names if it is larger."""
    needs = sum(int(number.replace(",", "")) for number in _NEEDS.findall(detail))
    newest = checkpoint_files.newest(run.checkpoints)
    return max(needs, 0 if newest is None else int(newest.manifest.get("bytes", 0)))


def explained_by_room(run: RunDir, failure: Failure) -> Failure:
    """Refine ``failure`` with the current state of the disk: replace a vague cause if the run directory is full or not
    writable now, and add the needed and the free bytes to the detail of ``disk_full``.

    If the run directory has enough space, another disk may be full, which cannot be checked here. ``failure`` is then
    returned unchanged.
    """
    may_be_elsewhere = failure.cause.name in ("exception", "io_error") and cause("unwritable").in_error(failure.detail)
    if failure.cause.name in _UNSPECIFIC_CAUSES or may_be_elsewhere:
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
    figures = f"the run needs {needed:,} bytes in {folder}, and {free:,} are free"
    return dataclasses.replace(failure, detail=f"{failure.detail}; {figures}")


def wait_before_start(run: RunDir, last: AttemptEnd | None, *, checks: bool) -> WaitForRoom | None:
    """Check the disk before the ranks start. Returns None if there is enough space, else a ``WaitForRoom`` to poll.

    Args:
        last: end line of the previous attempt. If that attempt failed for lack of space, its checkpoint must fit now.
        checks: check the disk before every start, not only after an attempt that failed for lack of space.

    Raises:
        RunDirectoryError: the run directory is gone.
    """
    found_none = last is not None and last.error_class in SHORT_OF_ROOM
    least = LEAST_BYTES if checks else 0
    if not least and not found_none:
        return None
    to_save = bytes_to_save(run, last.detail) if last is not None and found_none else 0
    wait = WaitForRoom(lambda: shortage(run, needed=least, to_save=to_save))
    if wait.missing is None:
        return None
    if not run.path.is_dir():
        raise gone(run)
    log.warning("%s. Waiting for up to %.0f minutes", wait.missing.text, PATIENCE_SECONDS / 60)
    return wait


class WaitForRoom:
    """Waits for free space in a run directory. Has the interface of ``RankProcesses``: ``poll`` returns exit code 0
    once there is enough space, and 1 after 10 minutes or a request to stop.

    Args:
        look: returns the current shortage, or None if there is enough space.
    """

    def __init__(self, look: Callable[[], DiskShortage | None]) -> None:
        self._look = look
        self._until = time.monotonic() + PATIENCE_SECONDS
        self._stop_requested = False
        self.missing = look()

    def poll(self) -> int | None:
        if self._stop_requested:
            return 1
        self.missing = self._look()
        if self.missing is None:
            return 0
        return 1 if time.monotonic() > self._until else None

    def failure(self) -> Failure | None:
        """The failure because of which the ranks cannot start after the wait; None if there is enough space now."""
        if self.missing is None:
            return None
        found = self.missing.failure()
        detail = f"{found.detail}; no change within {PATIENCE_SECONDS / 60:.0f} minutes"
        return dataclasses.replace(found, cause=dataclasses.replace(found.cause, follows="end"), detail=detail)

    def request_stop(self) -> None:
        self._stop_requested = True

    def kill(self) -> None:
        self._stop_requested = True

    def dump(self) -> None:
        pass

    def wake(self) -> None:
        pass
