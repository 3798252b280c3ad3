"""The step counter: the file ``step`` of an attempt, which holds the last step of rank 0 even if the rank is killed."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
from pathlib import Path
from time import time

from hpcaccel.core.durable_files import FILE_MODE, file_system, make_folder
from hpcaccel.core.run_dir import RunDir

__all__ = ["FORMAT", "StepCounter", "read_counter"]

FORMAT = struct.Struct("<qdqd")
"""Format of the step counter: the last step and its time (seconds since the epoch), stored twice. The copies differ
while the file is being written. In a mapped file the second step is 0: step and time are each written at once."""
LOOKS = 5
"""Maximum number of reads of a counter whose two copies differ."""
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
        self._steps: memoryview[int] = memoryview(b"")
        self._times: memoryview[float] = memoryview(b"").cast("d")
        """The mapped file as integers and as floats: assignments take half of the time of ``FORMAT.pack_into``."""
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
            self._steps[0] = step
            self._times[1] = now
            return
        os.pwrite(self._fd, FORMAT.pack(step, now, step, now), 0)
        if self._is_fresh:  # mapped after the first write, when the file has a block
            self._is_fresh = False
            self._map_file()

    def _map_file(self) -> None:
        with contextlib.suppress(OSError):
            if sys.byteorder == "little" and file_system(os.fstat(self._fd).st_dev) in LOCAL:
                self._map = mmap.mmap(self._fd, FORMAT.size)
                self._steps, self._times = memoryview(self._map).cast("q"), memoryview(self._map).cast("d")
                self._steps[2] = 0

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a late file-system error does not matter
            if self._map is not None:
                self._steps.release()
                self._times.release()
                self._map.close()
            os.close(self._fd)


def read_counter(run: RunDir, attempt: int) -> tuple[int, float] | None:
    """Step and time in rank 0's step counter, valid even if the rank was killed right after the step. None if no step
    is recorded, or if the two copies still differ after ``LOOKS`` reads (the rank was killed during a write).

    If the rank was killed during a write to a mapped file, the time may be that of the step before.
    """
    for _ in range(LOOKS):
        try:
            step, when, second_step, second_when = FORMAT.unpack(run.step_counter(attempt).read_bytes())
        except (OSError, struct.error):
            return None  # no step yet, or the program does not use the runtime
        if step and (second_step == 0 or (step, when) == (second_step, second_when)):
            return step, when
    return None
