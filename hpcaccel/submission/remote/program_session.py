"""One program on the login node, and its streams, however the connection is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from hpcaccel.errors import ClusterError

__all__ = ["Connection", "ConnectionLost", "Drain", "Session", "Unreachable"]


class Unreachable(ClusterError):
    """No connection could be made just now: it may help to try again."""


class ConnectionLost(ClusterError):
    """The connection broke. What was asked for may have happened or not."""


class Session(Protocol):
    """A program on the other side. ``read`` hands out b"" at the end; ``wait`` returns the exit code.

    ``write`` and ``wait`` raise ConnectionLost.
    """

    def write(self, data: bytes) -> None: ...

    def close_input(self) -> None: ...

    def read(self, count: int) -> bytes: ...

    def read_error(self, count: int) -> bytes: ...

    def wait(self) -> int: ...

    def close(self) -> None: ...


class Connection(Protocol):
    """Starts programs on the login node; what it is given is a line for the login shell there."""

    def start(self, command: str) -> Session: ...

    def terminal(self, command: str) -> int:
        """Run a program with this terminal as its own; its exit code."""

    def close(self) -> None: ...


class Drain:
    """Reads a program's stderr beside its stdout, so that neither waits for the other; the last of it is kept.

    Args:
        read: at most so many bytes of it, as they come; b"" at the end.
        hear: what is done with each piece besides.
    """

    KEPT_BYTES = 1 << 16

    def __init__(self, read: Callable[[int], bytes], hear: Callable[[bytes], None] = lambda piece: None) -> None:
        self._read, self._hear = read, hear
        self._kept = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while piece := self._read(1 << 15):
            self._kept = (self._kept + piece)[-self.KEPT_BYTES :]
            try:
                self._hear(piece)
            except OSError:  # nobody looks any more (`2>&1 | head`); the program must not wait for that
                self._hear = lambda piece: None

    def all(self) -> bytes:
        """What came, once the stream has ended."""
        self._thread.join()
        return self._kept
