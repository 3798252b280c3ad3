"""Writing to a run directory whose disk is full, or away for a moment: no run may be lost for a line of text."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from hpcaccel.core.run_dir import MOVED, RunDir
from hpcaccel.errors import RunDirectoryError

__all__ = ["PATIENCE_SECONDS", "THE_DISK_SAYS_NO", "fsync", "gone", "if_possible", "patiently"]

T = TypeVar("T")

PATIENCE_SECONDS = 600.0
"""How long to wait for somebody to make room: the nodes stand idle meanwhile."""
LOOK_SECONDS = 2.0
THE_DISK_SAYS_NO = {
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.EPERM, errno.EACCES,
}  # fmt: skip
_ENDS = {signal.SIGTERM, signal.SIGINT}


def patiently(write: Callable[[], T], *, run: RunDir, say: Callable[[str], None]) -> T:
    """What must be written before anything else may happen: try again for some minutes, as long as nobody wants us to
    leave. For a caller that keeps SIGTERM blocked, while no ranks run.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    until = None
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno == errno.ENOENT and not run.path.is_dir():
                raise gone(run) from None
            if error.errno not in THE_DISK_SAYS_NO:
                raise
            if until is None:
                until = time.monotonic() + PATIENCE_SECONDS
                say(
                    f"cannot write to {run.path}: {os.strerror(error.errno)}. Waiting for {PATIENCE_SECONDS / 60:.0f} "
                    "minutes for that to change"
                )
            if time.monotonic() > until or signal.sigpending() & _ENDS:
                raise RunDirectoryError(
                    f"cannot write to {run.path}: {os.strerror(error.errno)}. When it can be written again: "
                    f"hpcaccel resume {run.run_id}"
                ) from error
        time.sleep(LOOK_SECONDS)


def gone(run: RunDir) -> RunDirectoryError:
    return RunDirectoryError(
        f"{MOVED}: {run.path}. Nothing is made anew there, and this job ends. Move it back, then: "
        f"hpcaccel resume {run.run_id}"
    )


def fsync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that needs no sync
            raise


def if_possible(write: Callable[[], object], *, say: Callable[[str], None]) -> None:
    """What is good to have, while ranks run or are about to."""
    try:
        write()
    except OSError as error:
        say(f"cannot write {error.filename or 'to the run directory'}: {error.strerror}")
