"""Starts programs by forking a process that has already imported torch: see ``template.py``.

Each pytest process has its own templates, which start on first use and end with it.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

TEMPLATE = Path(__file__).parent / "template.py"
DIFFERENT = 2
NUMBER_BYTES = 4
READ_AT_START = (
    "PYTHON",
    "TORCH_",
    "TORCHDYNAMO_",
    "PYTORCH_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "LD_",
    "MALLOC_",
    "LC_",
    "LANG",
)
"""Prefixes of environment variables that Python, the C library and torch read only at start-up."""


class Forked:
    """A running program, with the interface of ``subprocess.Popen``. stdout and stderr share one pipe."""

    returncode: int | None = None

    def __init__(
        self, template: Template, command: Sequence[str], *, env: Mapping[str, str], blocked: Iterable[int]
    ) -> None:
        self.args = [sys.executable, *command]
        self._output, output = os.pipe()
        self._report, report = os.pipe()
        self._said = b""
        try:
            template.ask(
                {
                    "program": command[0],
                    "arguments": list(command[1:]),
                    "environment": dict(env),
                    "folder": os.getcwd(),
                    "blocked": list(blocked),
                },
                [output, report],
            )
        finally:
            os.close(output)
            os.close(report)
        self.pid = self._number()

    def _number(self) -> int:
        """The next number from the template: first the process id, then the exit code."""
        said = os.read(self._report, NUMBER_BYTES)
        assert said, "the template has ended"
        return int.from_bytes(said, sys.byteorder, signed=True)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], 0)[0]:
            self.returncode = self._number()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._report], [], [], timeout)[0]:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout, self._said)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._output], [], [], left)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout, self._said)
            found = os.read(self._output, 1 << 16)
            if not found:
                break
            self._said += found
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self._said.decode(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        for file in (self._output, self._report):
            os.close(file)


class Template:
    def __init__(self, env: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        self.env = env
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(TEMPLATE), str(theirs.fileno()), *preload],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._end)

    def ask(self, request: Mapping[str, object], files: Sequence[int]) -> None:
        socket.send_fds(self._requests, [json.dumps(request).encode()], files)

    def _end(self) -> None:
        self._requests.shutdown(socket.SHUT_RDWR)  # children of this process, such as a loader's workers, have it open
        self._requests.close()
        self._process.wait()


_templates: dict[tuple[str, ...], list[Template]] = {}
"""By the modules that they have imported in addition to torch."""


def templates(environs: Sequence[Mapping[str, str]], preload: Sequence[str] = ()) -> list[Template]:
    """A template for each environment, or an empty list if a new Python process is needed.

    Templates alternate, so that the order of sets differs between neighbouring ranks; with ``preload``, whose import
    takes long, there is one.
    """
    ready = _templates.setdefault(tuple(preload), [])
    different = 1 if preload else DIFFERENT
    while len(ready) < min(len(environs), different):
        ready.append(Template({**os.environ, **_read_at_start(environs[0])}, preload))
    found = [ready[number % different] for number in range(len(environs))]
    can = all(_read_at_start(one.env) == _read_at_start(env) for one, env in zip(found, environs, strict=True))
    return found if can else []


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}
