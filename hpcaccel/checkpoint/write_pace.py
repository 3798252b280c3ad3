"""The pace at which a writer process writes: spread over some seconds, or as fast as possible. Does not import torch.

Saves that take their time slow the training down less. A save that somebody waits for continues at full speed at once.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time

__all__ = ["LOWEST_RATE", "WritePace"]

PIECE_BYTES = 64 << 20
"""Number of bytes after which the clock is read again. Waiting between pieces costs the training some 0.2 ms a piece,
because the writer's code and data have left the processor's caches meanwhile."""
LOWEST_RATE = 128e6
"""Bytes per second of a rank below which writing is not slowed down: the commit should not come much later than it
could."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "riscv64": 30}
_IDLE, _NORMAL = 3 << 13, 0
"""I/O classes: served when nobody else uses the disk; that of the process's nice value."""


class WritePace:
    """The pace of one save.

    Args:
        size: how many bytes are written.
        seconds: the time to spread them over; 0: write as fast as possible.
        hurry: from the time that this is set, write as fast as possible.
    """

    def __init__(self, size: int, seconds: float, hurry: threading.Event) -> None:
        self._hurry = hurry
        self._begun = time.monotonic()
        self._io_class: int | None = None
        self._seconds_per_byte = min(seconds / size, 1 / LOWEST_RATE) if size else 0.0

    @property
    def is_slow(self) -> bool:
        return bool(self._seconds_per_byte) and not self._hurry.is_set()

    def step(self, left: int) -> int:
        """How many of ``left`` bytes to write next."""
        return min(left, PIECE_BYTES) if self.is_slow else left

    def wait(self, done: int) -> float:
        """Wait until it is time for the bytes after the first ``done``. Returns for how many seconds this waited."""
        now = time.monotonic()
        left = self._begun + done * self._seconds_per_byte - now
        if not self.is_slow or left <= 0:
            return 0.0
        self._hurry.wait(left)
        return time.monotonic() - now

    def set_io_class(self) -> None:
        """Set the I/O class of this thread: idle as long as the pace is slow. Has no effect where the system does not
        permit it, and on disks whose scheduler ignores classes."""
        wanted = _IDLE if self.is_slow else _NORMAL
        call = _IOPRIO_SET.get(platform.machine())
        if call is not None and wanted != self._io_class:
            of_this_thread = 1, 0
            ctypes.CDLL(None).syscall(call, *of_this_thread, wanted)
            self._io_class = wanted
