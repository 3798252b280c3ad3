"""The step counter: the file ``step`` of an attempt, which holds the last step of rank 0 even if the rank is killed."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path
from time import time

from hpcaccel.core.durable_files import FILE_MODE, file_system, make_folder
from hpcaccel.core.run_dir import RunDir

__all__ = ["FORMAT", "StepCounter", "read_counter"]

FORMAT = struct.Struct("<qdqd")
"""Format of the step counter: the last step and its time (seconds since the epoch), stored twice. The copies differ
while the file is being written."""
_pack_into = FORMAT.pack_into
LOOKS = 5
"""Maximum number of reads of a counter whose two copies differ. A write makes them differ for nanoseconds."""
LOCAL = ("ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs")
"""File systems on which a written block can be overwritten even if the disk is full."""


class StepCounter:
    """Writes the number of rank 0's last step to a file.

    On local file systems the file is mapped into memory: a write needs no system call, and the kernel keeps the value
    if the process is killed. On other file systems a write is one ``pwrite`` call, because a network error in a mapping
    raises SIGBUS, which would kill the training.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._map: mmap.mmap | None = None
        self._is_fresh = True
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    @property
    def is_mapped(self) -> bool:
        """Whether the file is mapped into memory; False before the first write."""
        return self._map is not None

    def write(self, step: int) -> None:
        """Write the number of the last step.

        Raises:
            OSError: the file cannot be written.
        """
        now = time()
        if self._map is not None:
            _pack_into(self._map, 0, step, now, step, now)
            return
        os.pwrite(self._fd, FORMAT.pack(step, now, step, now), 0)
        if self._is_fresh:  # mapped after the first write, when the file has a block
            self._is_fresh = False
            self._map = self._mapped(FORMAT.size)

    def _mapped(self, size: int) -> mmap.mmap | None:
        with contextlib.suppress(OSError):
            if file_system(os.fstat(self._fd).st_dev) in LOCAL:
                return mmap.mmap(self._fd, size)
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a late file-system error does not matter
            if self._map is not None:
                self._map.close()
            os.close(self._fd)


def read_counter(run: RunDir, attempt: int) -> tuple[int, float] | None:
    """Step and time in rank 0's step counter, valid even if the rank was killed right after the step. None if no
    step is recorded, or if the two copies still differ after ``LOOKS`` reads (the rank was killed during a write)."""
    for _ in range(LOOKS):
        try:
            *first, step, when = FORMAT.unpack(run.step_counter(attempt).read_bytes())
            if step and first == [step, when]:
                return step, when
        except (OSError, struct.error):
            return None  # no step yet, or the program does not use the runtime
    return None
