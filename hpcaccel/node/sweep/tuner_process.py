"""The tuner of a sweep's worker: a child process that chooses the next trial, and that is restarted if it dies.

Worker and tuner exchange JSON lines over the tuner's standard input and output.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import LineSplitter, json_line
from hpcaccel.core.parent_death import dying_with_us

__all__ = ["TUNER_SIGNAL", "TunerProcess"]

log = logging.getLogger(__name__)

TUNER_SIGNAL = signal.SIGURG
"""Signal that the kernel sends to the worker when the tuner has written output. The worker blocks this signal and waits
for it. By default, processes ignore it."""
BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}
"""Signals that are blocked in the tuner, because Slurm signals all processes of a batch step. The worker informs the
tuner of a stop with an event."""
CRASHES = 3
"""After this number of crashes in a row, between which no trial has ended, the tuner is not restarted."""
PAUSES_SECONDS = (0.0, 1.0, 3.0)
"""Pauses before a restart, indexed by the number of crashes."""
LEAVE_SECONDS = 20.0
"""How long the tuner may take to exit once its standard input is closed."""
PIECE_BYTES = 1 << 16
OURS = "hpcaccel: "
"""Prefix of error lines that the tuner itself writes to its log."""


class TunerProcess:
    """The tuner's process, its event queue and its restarts.

    Args:
        command: the command line of the tuner.
        log: file for the tuner's standard error.
        hello: returns the first events for a tuner that has just been started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        hello: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self._command = list(command)
        self._log = log
        self._hello = hello
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = LineSplitter()
        self._unsent: list[dict[str, Any]] = []
        """Events that have not been sent, or not completely."""
        self._written = 0
        """Number of bytes of the first unsent event that are already written."""
        self._crashes = 0
        self._again_at = 0.0
        self._log_offset = 0
        """Offset in the log at which the output of the current tuner process begins."""
        self.end: dict[str, Any] | None = None
        """The tuner's final message; None while it may still choose trials."""
        self.failed = ""
        """Why the tuner is not restarted; empty unless it could not start or crashed too often."""

    @property
    def gone(self) -> bool:
        """Whether no tuner is running and none will be started."""
        return self._process is None and (self.end is not None or bool(self.failed))

    # -- sending events -------------------------------------------------------------------------------------------

    def send(self, event: dict[str, Any]) -> None:
        if event["event"] == "ended":
            self._crashes = 0
        self._unsent.append(event)
        self._flush()

    def _flush(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        while self._unsent:
            line = json_line(self._unsent[0])
            try:
                self._written += os.write(self._process.stdin.fileno(), line[self._written :])
            except (BlockingIOError, BrokenPipeError):
                return  # the pipe is full until the tuner reads, or the tuner has ended, which ``read`` handles
            if self._written == len(line):
                self._unsent.pop(0)
                self._written = 0

    # -- reading messages -----------------------------------------------------------------------------------------

    def read(self) -> list[dict[str, Any]]:
        """The tuner's messages since the last call. Also starts a tuner if one is due, and handles its exit."""
        if self._process is None:
            self._start_again()
            return []
        self._flush()
        code = self._process.poll()
        messages = self._read(self._process)
        for message in messages:
            if message.get("end"):
                self.end = message
        if code is not None:
            self._handle_exit(code)
        return messages

    def _read(self, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        assert process.stdout is not None
        pieces = []
        while True:
            try:
                piece = os.read(process.stdout.fileno(), PIECE_BYTES)
            except BlockingIOError:
                break
            if not piece:
                break
            pieces.append(piece)
        lines = self._lines.feed(b"".join(pieces))
        return [message for line in lines if (message := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            log.warning(
                f"ignoring output of the tuner that is not a JSON object: {line[:200].decode(errors='replace')}"
            )
            return None
        return message

    # -- start and exit -------------------------------------------------------------------------------------------

    def _start_again(self) -> None:
        if self.gone or time.monotonic() < self._again_at:
            return
        try:
            with self._log.open("ab") as file:
                self._log_offset = file.tell()
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    bufsize=0,
                    preexec_fn=dying_with_us(blocked=BLOCKED_SIGNALS),
                    start_new_session=True,
                )
        except OSError as error:
            self.failed = f"cannot start the tuner: {error}"
            log.warning(self.failed)
            return
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        os.set_blocking(fd, False)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, TUNER_SIGNAL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._lines, self._written = LineSplitter(), 0
        self._unsent = [*self._hello(), *self._unsent]
        self._flush()

    def _handle_exit(self, code: int) -> None:
        self._close()
        # The next tuner process gets the events about ended trials that have not been sent to this one.
        self._unsent = [event for event in self._unsent if event["event"] == "ended"]
        if self.end is not None and code == 0:
            return
        self.end = None
        self._crashes += 1
        how = f"signal {-code}" if code < 0 else f"code {code}" if code else "code 0, but without a final message"
        what = f"the tuner died ({how}){self._last_message()}; see {self._log}"
        if self._crashes >= CRASHES:
            self.failed = f"{what}. It died {self._crashes} times without a trial ending in between: not restarting it"
            log.warning(self.failed)
            return
        self._again_at = time.monotonic() + PAUSES_SECONDS[self._crashes]
        log.warning(f"{what}; restarting it")

    def _last_message(self) -> str:
        """The last error line in the tuner's log, prefixed with a colon; empty if there is none."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_offset, file.seek(0, os.SEEK_END) - PIECE_BYTES))
                lines = file.read(PIECE_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ""
        messages = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
        return f": {messages[-1]}" if messages else ""

    def kill(self, why: str) -> None:
        """Kill a tuner that sends invalid messages. This counts as a crash."""
        if self._process is not None:
            log.warning(f"{why}: killing the tuner")
            self._process.kill()

    def dismiss(self, patience_seconds: float = LEAVE_SECONDS) -> None:
        """Close the tuner's standard input, so that the tuner records the last events and exits. Kill it if it does not
        exit in time."""
        if self._process is None:
            return
        self._flush()
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            log.warning(f"the tuner did not exit within {patience_seconds:.0f} s: killing it")
            process.kill()
            process.wait()
        self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
