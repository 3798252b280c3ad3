"""How the two hpcaccels speak: the other side says hello, this side asks one thing in a JSON line (bytes may follow),
the other side answers in frames. A frame is a JSON line; its ``bytes`` say how many raw bytes come behind it.

An answer without its last frame (``exit``) has not arrived: that is how a connection that broke is told from an end.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

__all__ = ["PROTOCOL", "FrameReader", "FrameWriter", "Torn", "hello_line", "parse_hello", "version_key"]

PROTOCOL = 1
"""Counts up when an older side could not follow any more."""

_HELLO = re.compile(rb"hpcaccel-answers (\d+) (\S+)\s*")
_LONGEST_LINE = 64 << 20


class Torn(Exception):
    """The stream ended within a frame, or before the last one."""


def hello_line(version: str) -> bytes:
    return f"hpcaccel-answers {PROTOCOL} {version}\n".encode()


def parse_hello(line: bytes) -> tuple[int, str] | None:
    """Protocol and version, or None for anything else: what a login shell greets with comes first."""
    found = _HELLO.fullmatch(line)
    return None if found is None else (int(found[1]), found[2].decode("ascii", "replace"))


def version_key(version: str) -> tuple[int, ...]:
    """For comparing: ``0.10.1.dev3`` → (0, 10, 1)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return () if found is None else tuple(int(part) for part in found[0].split("."))


class FrameWriter:
    """Writes whole frames, from several threads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        head = json.dumps({"frame": frame, **values, "bytes": len(payload)}).encode() + b"\n"
        with self._lock:
            self._stream.write(head + payload)
            self._stream.flush()


class FrameReader:
    """Reads lines and frames from whatever hands out bytes.

    Args:
        read: at most so many bytes; b"" at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._rest = b""

    def line(self) -> bytes | None:
        """The next line; None at the end of the stream."""
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            piece = self._read(1 << 16)
            if not piece or sum(map(len, pieces)) > _LONGEST_LINE:
                self._rest = b"".join(pieces)
                return None
            pieces.append(piece)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        return line

    def frame(self) -> tuple[dict[str, Any], bytes]:
        """The next frame and what it carries.

        Raises:
            Torn: there is none any more.
        """
        line = self.line()
        if line is None:
            raise Torn
        head: dict[str, Any] = json.loads(line)
        return head, self._exactly(int(head["bytes"]))

    def _exactly(self, count: int) -> bytes:
        pieces = [self._rest[:count]]
        self._rest = self._rest[count:]
        missing = count - len(pieces[0])
        while missing:
            piece = self._read(min(missing, 1 << 20))
            if not piece:
                raise Torn
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)
