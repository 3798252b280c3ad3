"""The file that holds the last step of rank 0. It is written at each step, so that also a rank that is killed next has
said how far it came; ``hpcaccel.core.attempt_steps`` reads it.

On file systems of the node's own the file is mapped into memory: a step then writes it without a system call, and the
kernel keeps what was written when the process is killed. On others a step is one ``pwrite``: an error of the network
would come to a mapping as SIGBUS, and end the training for the sake of a figure.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from pathlib import Path

from hpcaccel.core.attempt_steps import STEP_COUNTER
from hpcaccel.core.run_dir import FILE_MODE, make_folder

__all__ = ["StepCounter"]

LOCAL = ("ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs")
"""File systems on which a block that has been written once can be written again, also when the disk is full."""


class StepCounter:
    """
    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._map: mmap.mmap | None = None
        self._is_fresh = True
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def write(self, step: int) -> None:
        """
        Raises:
            OSError: the file cannot be written.
        """
        now = time.time()
        if self._map is not None:
            STEP_COUNTER.pack_into(self._map, 0, step, now, step, now)
            return
        os.pwrite(self._fd, STEP_COUNTER.pack(step, now, step, now), 0)
        if self._is_fresh:  # mapped only now that the file has its block
            self._is_fresh = False
            self._map = self._mapped(STEP_COUNTER.size)

    def _mapped(self, size: int) -> mmap.mmap | None:
        with contextlib.suppress(OSError):
            if _file_system(os.fstat(self._fd).st_dev) in LOCAL:
                return mmap.mmap(self._fd, size)
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what the file system says late about a figure for people
            if self._map is not None:
                self._map.close()
            os.close(self._fd)


def _file_system(device: int) -> str | None:
    """The type of the one that is mounted as ``device``; None where that cannot be found out."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            place, _, source = line.partition(" - ")
            if place.split()[2:3] == [wanted]:
                return source.partition(" ")[0]
    return None
