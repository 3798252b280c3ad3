"""A connection through the user's own ``ssh``, if ``~/.ssh/config`` shares one connection between commands.

ssh then prompts for a one-time code only once, not for every command.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import IO

from hpcaccel.errors import ClusterError
from hpcaccel.submission.remote.protocol import Connection, ConnectionLost, ProgramSession, Unreachable

__all__ = ["OpenSshConnection", "shares_connections"]

SSH_FAILED = 255
"""ssh's exit code for a failed or broken connection."""


def _arguments(host: str) -> list[str]:
    login, colon, port = host.rpartition(":")
    if colon and port.isdigit() and not login.endswith(":"):
        return ["-p", port, login.strip("[]")]
    return [host]


def shares_connections(host: str) -> bool:
    """Whether the user's ssh keeps connections to ``host`` open (ControlMaster with a ControlPath)."""
    if shutil.which("ssh") is None:
        return False
    command = ["ssh", "-G", *_arguments(host)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    values = dict(line.partition(" ")[::2] for line in result.stdout.splitlines())
    return values.get("controlmaster", "false") not in ("false", "no") and values.get("controlpath", "none") != "none"


class OpenSshConnection(Connection):
    def __init__(self, host: str, *, cluster: str) -> None:
        self._host = host
        self._cluster = cluster

    def start(self, command: str) -> ProgramSession:
        command_line = ["ssh", "-T", "-o", "StrictHostKeyChecking=yes", *_arguments(self._host), command]
        process = subprocess.Popen(
            command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        return ProcessSession(process, self._host)

    def terminal(self, command: str) -> int:
        command_line = ["ssh", "-t", "-o", "StrictHostKeyChecking=yes", *_arguments(self._host), command]
        return subprocess.run(command_line, check=False).returncode

    def close(self) -> None:
        """Do nothing: ssh manages the connection."""


class ProcessSession(ProgramSession):
    def __init__(self, process: subprocess.Popen[bytes], host: str) -> None:
        self._process = process
        self._host = host
        self._stderr = b""

    def write(self, data: bytes) -> None:
        try:
            while data:
                data = data[_stream(self._process.stdin).write(data) :]
        except OSError:
            code = self.wait()
            raise ConnectionLost(
                f"the program on {self._host} exited with code {code} before it had read all input"
            ) from None

    def close_input(self) -> None:
        _stream(self._process.stdin).close()

    def read(self, count: int) -> bytes:
        return _stream(self._process.stdout).read(count)

    def read_error(self, count: int) -> bytes:
        try:
            piece = _stream(self._process.stderr).read(count)
        except (ValueError, OSError):  # closed by this side, before the read or during it
            return b""
        self._stderr = (self._stderr + piece)[-4096:]
        return piece

    def wait(self) -> int:
        code = self._process.wait()
        if code == SSH_FAILED:
            raise self._why()
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            _stream(stream).close()

    def _why(self) -> ClusterError:
        stderr = self._stderr.decode("utf-8", "replace").strip()
        if "Host key verification failed" in stderr or "Permission denied" in stderr or "Could not resolve" in stderr:
            return ClusterError(f"ssh {self._host}: {stderr}. Log in once with `ssh {self._host}`, then try again")
        if "Connection refused" in stderr or "timed out" in stderr or "No route" in stderr:
            return Unreachable(f"ssh {self._host}: {stderr}. Check the network, VPN and port")
        return ConnectionLost(
            f"the program on {self._host} ended without an exit status: the connection was lost, or the program was "
            f"killed{f' ({stderr})' if stderr else ''}"
        )


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
