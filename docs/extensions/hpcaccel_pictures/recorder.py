"""Recording of commands in a pseudo-terminal, with the times of what they print."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from hpcaccel_pictures.recording import OUTPUT, TYPED, Recording

__all__ = ["Recorder"]

PROMPT = "\x1b[1;32m$\x1b[0m "
KEY_SECONDS = 0.06
READ_BYTES = 65536
ERASE_LINE = b"\x1b[2K"
WHOLE_SECONDS = 0.05
"""After the first bytes of an output, how long to wait for the rest, so that no name is divided."""


class Recorder:
    """Runs commands one after the other as if they were typed, and records the session.

    Args:
        folder: where the commands run.
        environment: theirs.
    """

    def __init__(self, *, columns: int, rows: int, title: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._size = (columns, rows)
        self._title = title
        self._folder = folder
        self._environment = {**environment, "TERM": "xterm-256color", "COLUMNS": str(columns)}
        self._events: list[tuple[float, str, str]] = []
        self._start = time.monotonic()

    @property
    def recording(self) -> Recording:
        columns, rows = self._size
        events = tuple(sorted(self._events, key=lambda event: event[0]))
        return Recording(columns=columns, rows=rows, title=self._title, events=events)

    def prompt(self) -> None:
        self._record(OUTPUT, PROMPT)

    def typed_elsewhere(self, command: str) -> None:
        """Record that a command was typed in another terminal at this moment."""
        self._record(TYPED, command)

    def run(self, command: str) -> int:
        """Type a command at a prompt, run it in a shell, and record what it prints. Returns its exit code."""
        self.prompt()
        for key in command:
            time.sleep(KEY_SECONDS)
            self._record(OUTPUT, key)
        time.sleep(10 * KEY_SECONDS)
        self._record(OUTPUT, "\r\n")
        master, slave = pty.openpty()
        columns, rows = self._size
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self._folder, env=self._environment, start_new_session=True,
            stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)
        try:
            self._read(master)
        finally:
            os.close(master)
        return process.wait()

    def _read(self, master: int) -> None:
        """Record all output until the program has closed its terminal, but not a display that draws the same again."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        before = b""
        while True:
            select.select([master], [], [])
            time.sleep(WHOLE_SECONDS)
            try:
                found = os.read(master, READ_BYTES)
            except OSError:  # Linux: the other end is closed
                return
            if not found:
                return
            if found == before and ERASE_LINE in found:
                continue
            before = found
            self._record(OUTPUT, decode(found))

    def _record(self, kind: str, text: str) -> None:
        self._events.append((round(time.monotonic() - self._start, 3), kind, text))
