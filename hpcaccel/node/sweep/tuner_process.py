"""The chooser of a sweep's worker: the process that says which trial comes next. It may crash; the host may not.

Both sides speak JSON lines, on the chooser's standard input and output.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcaccel.node.launchers.start_ranks import dying_with_us

__all__ = ["SPOKEN", "Chooser"]

SPOKEN = signal.SIGURG
"""Comes when the chooser has said something; to be blocked and waited for. It harms nobody who does not."""
DEAF = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}
"""Slurm signals all processes of a batch step. What these mean the host tells the chooser in words."""
CRASHES = 3
"""A chooser that has died so many times, without a trial's end in between, is not started again."""
PAUSES_SECONDS = (0.0, 1.0, 3.0)
LEAVE_SECONDS = 20.0
PIECE_BYTES = 1 << 16
OURS = "hpcaccel: "
"""A line of a chooser's that names an error of ours begins so."""


class Chooser:
    """One chooser after another, for as long as they are wanted.

    Args:
        command: starts it.
        log: gets what it prints to standard error.
        hello: the first words to each, asked for when it starts.
        say: tells the host's log.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        hello: Callable[[], list[dict[str, Any]]],
        say: Callable[[str], None],
    ) -> None:
        self._command = list(command)
        self._log = log
        self._hello = hello
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._torn = b""
        self._untold: list[dict[str, Any]] = []
        """What there was nobody to tell; and of the first of it, how many bytes are told."""
        self._written = 0
        self._crashes = 0
        self._again_at = 0.0
        self._said_before = 0
        """Where in the log the words of this one begin."""
        self.end: dict[str, Any] | None = None
        """Its last word, once it has nothing more to do here."""
        self.failed = ""
        """Why there is none any more, once it has crashed too often."""

    @property
    def gone(self) -> bool:
        """Whether none runs, and none will."""
        return self._process is None and (self.end is not None or bool(self.failed))

    # -- speaking -------------------------------------------------------------------------------------------------

    def tell(self, event: dict[str, Any]) -> None:
        if event["event"] == "ended":
            self._crashes = 0
        self._untold.append(event)
        self._send()

    def _send(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        while self._untold:
            line = json.dumps(self._untold[0]).encode() + b"\n"
            try:
                self._written += os.write(self._process.stdin.fileno(), line[self._written :])
            except (BlockingIOError, BrokenPipeError):
                return  # it will read later; or its end is seen soon
            if self._written == len(line):
                self._untold.pop(0)
                self._written = 0

    # -- hearing --------------------------------------------------------------------------------------------------

    def hear(self) -> list[dict[str, Any]]:
        """What it has said since the last call. Starts one where one is due, and sees one's end."""
        if self._process is None:
            self._start_again()
            return []
        self._send()
        code = self._process.poll()
        messages = self._read(self._process)
        for message in messages:
            if message.get("end"):
                self.end = message
        if code is not None:
            self._has_left(code)
        return messages

    def _read(self, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        assert process.stdout is not None
        pieces = [self._torn]
        while True:
            try:
                piece = os.read(process.stdout.fileno(), PIECE_BYTES)
            except BlockingIOError:
                break
            if not piece:
                break
            pieces.append(piece)
        *lines, self._torn = b"".join(pieces).split(b"\n")
        return [message for line in lines if (message := self._understood(line)) is not None]

    def _understood(self, line: bytes) -> dict[str, Any] | None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self._say(f"the chooser has printed what is no message: {line[:200].decode(errors='replace')}")
            return None
        return message

    # -- beginning and end ----------------------------------------------------------------------------------------

    def _start_again(self) -> None:
        if self.gone or time.monotonic() < self._again_at:
            return
        try:
            with self._log.open("ab") as log:
                self._said_before = log.tell()
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    preexec_fn=dying_with_us(deaf_to=DEAF),
                    start_new_session=True,
                )
        except OSError as error:
            self.failed = f"the chooser cannot be started: {error}"
            self._say(self.failed)
            return
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        os.set_blocking(fd, False)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, SPOKEN)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._torn, self._written = b"", 0
        self._untold = [*self._hello(), *self._untold]
        self._send()

    def _has_left(self, code: int) -> None:
        self._close()
        # Ends that nobody has read are told to the next one.
        self._untold = [event for event in self._untold if event["event"] == "ended"]
        if self.end is not None and code == 0:
            return
        self.end = None
        self._crashes += 1
        how = f"signal {-code}" if code < 0 else f"code {code}" if code else "code 0, but without a last word"
        what = f"the chooser has died ({how}){self._last_words()}; see {self._log}"
        if self._crashes >= CRASHES:
            self.failed = f"{what}. {self._crashes} times without a trial's end in between: giving up"
            self._say(self.failed)
            return
        self._again_at = time.monotonic() + PAUSES_SECONDS[self._crashes]
        self._say(f"{what}; starting it again")

    def _last_words(self) -> str:
        """What it said was wrong, if it did: a full disk, for instance."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(self._said_before, log.seek(0, os.SEEK_END) - PIECE_BYTES))
                lines = log.read(PIECE_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
        return f": {said[-1]}" if said else ""

    def kill(self, why: str) -> None:
        """End one that makes no sense; it counts as a crash."""
        if self._process is not None:
            self._say(f"{why}: ending the chooser")
            self._process.kill()

    def dismiss(self, patience_seconds: float = LEAVE_SECONDS) -> None:
        """Nothing more is said: let it write down what it has heard, and see it leave."""
        if self._process is None:
            return
        self._send()
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._say(f"the chooser has not left within {patience_seconds:.0f} s: killing it")
            process.kill()
            process.wait()
        self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
