"""What srun says about its tasks, read from its standard error, so that a failed rank is noticed at once.

With --kill-on-bad-exit srun sends the other tasks SIGTERM, and SIGKILL only after the site's ``KillWait`` (30 s by
default). Ranks that wait in a collective for the failed one ignore SIGTERM, so each restart would take that long.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress

from hpcaccel.core.durable_files import write_all
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.node.warm.warm_channel import wake_at_input

__all__ = ["SrunMessages"]

PIPE_BYTES = 1 << 20
"""Size of the pipe, if the system permits it: srun waits when it is full."""
_EXIT = re.compile(rb"^srun: error: .*: tasks? [\d,-]+: Exited with exit code (\d+)$")
_SIGNAL = re.compile(rb"^srun: error: .*: tasks? [\d,-]+: ([A-Z].*)$")
_NO_CRASH = (b"Exited", b"Terminated")
"""Texts that do not show a crash. A program that is not cooperative is stopped with SIGTERM, and may exit with any code
while its other ranks still save."""


class SrunMessages:
    """The standard error of srun, which ``forward`` passes on.

    Args:
        cooperative: whether ranks that are stopped exit with ``EXIT_CONTINUED``, so that other codes show a failure.
    """

    def __init__(self, *, cooperative: bool) -> None:
        self._cooperative = cooperative
        self._input, self.output = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._input, False)
        wake_at_input(self._input)
        self._rest = b""

    def forward(self) -> str:
        """Copy what srun has written to this process's standard error, without waiting.

        Returns:
            srun's message about a rank that has failed; empty if there is none among the new ones.
        """
        found = ""
        while data := self._read():
            with suppress(OSError):  # the disk of slurm.log is full
                write_all(2, data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            found = found or next((line.decode(errors="replace") for line in lines if self._shows_failure(line)), "")
        return found.removeprefix("srun: error: ")

    def close(self) -> None:
        """Close both ends. srun has ended."""
        for descriptor in (self._input, self.output):
            if descriptor >= 0:
                os.close(descriptor)
        self._input = self.output = -1

    def _read(self) -> bytes:
        try:
            return os.read(self._input, 1 << 16) if self._input >= 0 else b""
        except BlockingIOError:
            return b""

    def _shows_failure(self, line: bytes) -> bool:
        if (exited := _EXIT.match(line)) is not None:
            return self._cooperative and int(exited[1]) != EXIT_CONTINUED
        killed = _SIGNAL.match(line)
        return killed is not None and not killed[1].startswith(_NO_CRASH)
