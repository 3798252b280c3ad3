"""Protocol with hpcaccel on a login node: its command line, and the frames exchanged on its standard streams.

The login node sends a hello line, this side sends a request (a JSON line, possibly followed by raw bytes), and the
login node replies in frames. A frame is a JSON line, whose key ``bytes`` is the number of raw bytes that follow. A
reply without the last frame (``exit``) is incomplete: this distinguishes a broken connection from a normal end.
"""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

from hpcaccel.errors import ClusterError

__all__ = [
    "INSTALLED",
    "PROTOCOL",
    "Connection",
    "ConnectionLost",
    "Drain",
    "FrameReader",
    "FrameWriter",
    "ProgramSession",
    "Torn",
    "Unreachable",
    "answering",
    "command_line",
    "hello_line",
    "in_login_shell",
    "parse_hello",
    "version_key",
]


PROTOCOL = 1
"""Incremented when older versions become incompatible."""

_HELLO = re.compile(rb"hpcaccel-answers (\d+) (\S+)\s*")
_LONGEST_LINE = 64 << 20


class Torn(Exception):
    """The stream ended within a frame, or before the last frame."""


def hello_line(version: str) -> bytes:
    return f"hpcaccel-answers {PROTOCOL} {version}\n".encode()


def parse_hello(line: bytes) -> tuple[int, str] | None:
    """Parse a hello line into protocol and version. None for other lines: a login shell may print a greeting first."""
    found = _HELLO.fullmatch(line)
    return None if found is None else (int(found[1]), found[2].decode("ascii", "replace"))


def version_key(version: str) -> tuple[int, ...]:
    """A sort key: ``0.10.1.dev3`` → (0, 10, 1)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return () if found is None else tuple(int(part) for part in found[0].split("."))


class FrameWriter:
    """Writes whole frames; thread-safe."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        head = json.dumps({"frame": frame, **values, "bytes": len(payload)}).encode() + b"\n"
        with self._lock:
            self._stream.write(head + payload)
            self._stream.flush()


class FrameReader:
    """Reads lines and frames.

    Args:
        read: returns at most the given number of bytes; b"" at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._rest = b""

    def line(self) -> bytes | None:
        """The next line; None at the end of the stream, or if the line is too long."""
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
        """The next frame and its payload.

        Raises:
            Torn: the stream ended, or a line is too long.
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


class Unreachable(ClusterError):
    """No connection could be made; a later try may succeed."""


class ConnectionLost(ClusterError):
    """The connection broke. The request may or may not have been executed."""


class ProgramSession(Protocol):
    """A program on the login node. ``read`` returns b"" at the end; ``wait`` returns the exit code.

    ``write``, ``close_input`` and ``wait`` raise ClusterError if the connection fails, usually ConnectionLost.
    """

    def write(self, data: bytes) -> None: ...

    def close_input(self) -> None: ...

    def read(self, count: int) -> bytes: ...

    def read_error(self, count: int) -> bytes: ...

    def wait(self) -> int: ...

    def close(self) -> None: ...


class Connection(Protocol):
    """Starts programs on the login node; a command is a line for the user's login shell."""

    def start(self, command: str) -> ProgramSession: ...

    def terminal(self, command: str) -> int:
        """Run a program on this terminal; returns its exit code."""

    def close(self) -> None: ...


class Drain:
    """Reads a program's stderr in a thread, as a full pipe would block the program. Keeps the last ``KEPT_BYTES``.

    Args:
        read: returns at most the given number of bytes; b"" at the end.
        on_piece: called with each piece, as bytes.
    """

    KEPT_BYTES = 1 << 16

    def __init__(self, read: Callable[[int], bytes], on_piece: Callable[[bytes], None] = lambda piece: None) -> None:
        self._read, self._on_piece = read, on_piece
        self._kept = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while piece := self._read(1 << 15):
            self._kept = (self._kept + piece)[-self.KEPT_BYTES :]
            try:
                self._on_piece(piece)
            except OSError:  # the output was closed (`2>&1 | head`); the program must not block
                self._on_piece = lambda piece: None

    def all(self) -> bytes:
        """Wait for the end of the stream and return the kept bytes."""
        self._thread.join()
        return self._kept


INSTALLED = "~/.local/share/hpcaccel/env/bin/hpcaccel"
"""The path to which ``cluster install`` installs hpcaccel by default."""

_VARIABLE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def in_login_shell(line: str) -> str:
    """A command that runs ``line`` in bash after the site's login scripts, which set up modules and Slurm's path.

    The scripts get an empty stdin, so that they cannot read the stdin of the command.
    """
    return shlex.join(["bash", "-c", f"exec 3<&0; exec bash -lc {shlex.quote('exec 0<&3 3<&-; ' + line)} < /dev/null"])


def command_line(args: Sequence[str]) -> str:
    return in_login_shell("exec " + shlex.join(args))


def answering(program: str | None, *args: str) -> str:
    """The command line of hpcaccel on the login node, with ``args``.

    Args:
        program: the path of hpcaccel on the login node, which may begin with ``~/`` and contain ``${env:NAME}``.
            If None, ``INSTALLED`` is used if it exists, else the first ``hpcaccel`` on PATH.
    """
    words = shlex.join(args)
    if program is not None:
        return in_login_shell(f"exec {_path(program)} {words}")
    return in_login_shell(f'p={_path(INSTALLED)}; [ -x "$p" ] || p=hpcaccel; exec "$p" {words}')


def _path(text: str) -> str:
    """A path as a shell word, in which the login node expands only a leading ``~/`` and ``${env:NAME}``."""
    head, text = ('"$HOME"', text[1:]) if text.startswith("~/") else ("", text)
    words = []
    for index, piece in enumerate(_VARIABLE.split(text)):  # odd pieces are names of variables
        words.append(f'"${{{piece}}}"' if index % 2 else shlex.quote(piece) if piece else "")
    return head + "".join(words)
