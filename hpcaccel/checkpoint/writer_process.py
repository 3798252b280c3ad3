"""The rank's handle on its writer: starting it, talking with it without waiting, ending it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from hpcaccel.checkpoint.snapshot_memory import Memory

__all__ = ["WriterProcess"]

_PROGRAM = (
    "import json, sys; sys.path += json.loads(sys.argv[1]); "
    "from hpcaccel.checkpoint.writer import main; main(sys.argv[2:])"
)


class WriterProcess:
    """The process with the memory that it shares; see ``writer`` for what it does.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, memory: Memory) -> None:
        arguments = [json.dumps(_places()), str(memory.descriptor), str(memory.size), str(os.getpid())]
        # Signals that come while it starts are not for it either: the mask goes with it, for good.
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(memory.descriptor,),
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self._output: IO[bytes] = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._received = b""
        self._words: dict[str, Any] = {}
        self._problem: str | None = None
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        self._end.atexit = False

    @property
    def heard(self) -> set[str]:
        """What it has said of the job that it has."""
        return set(self._words)

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def send(self, order: dict[str, Any], index: bytes) -> None:
        self._words.clear()
        data = memoryview(json.dumps({**order, "index_bytes": len(index)}).encode() + b"\n" + index)
        while data:
            data = data[os.write(self._input.fileno(), data) :]

    def look(self) -> str | None:
        """Hear what it has said meanwhile; why it has failed, or None."""
        while self._problem is None and self._poll.poll(0):
            piece = os.read(self._output.fileno(), 1 << 16)
            if not piece:
                self._problem = f"the process that writes it has ended ({self._ended()})"
                break
            *lines, self._received = (self._received + piece).split(b"\n")
            for line in lines:
                self._words.update(json.loads(line))
            self._problem = self._words.get("failed")
        return self._problem

    def _ended(self) -> str:
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def wait(self, seconds: float) -> None:
        self._poll.poll(1000 * seconds)

    def forget(self) -> dict[str, Any]:
        words, self._words = self._words, {}
        return words

    def stop(self) -> None:
        """End it, whatever it does."""
        self._end()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the rank, a data loader's worker say
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _places() -> list[str]:
    """Where the writer, which looks for packages nowhere by itself, finds this one and what reckons CRCs fast."""
    found = [Path(__file__).parents[2]]
    spec = find_spec("isal")
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parents[1])
    return [str(place) for place in found]
