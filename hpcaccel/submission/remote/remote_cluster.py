"""Requests to a cluster behind SSH, repeated when the connection breaks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import hpcaccel
from hpcaccel.errors import ClusterError
from hpcaccel.submission.remote.protocol import (
    PROTOCOL,
    Connection,
    ConnectionLost,
    Drain,
    FrameReader,
    ProgramSession,
    Torn,
    Unreachable,
    answering,
    command_line,
    parse_hello,
    version_key,
)

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile

__all__ = ["RemoteCluster", "RemoteRequest", "RemoteResult"]

PAUSES_SECONDS = (0.5, 2.0, 5.0, 10.0)
"""Pauses before the retries after a broken connection. If the last retry fails, an error is raised."""
STEADY_SECONDS = 60.0
"""After a connection that lasted this long, all retries are available again: a run may be followed for days."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Shell exit codes for a program that cannot be started."""

Frame = tuple[dict[str, Any], bytes]
Payloads = dict[str, bytes]
"""The payloads of each kind of frame, concatenated."""


@dataclass(frozen=True)
class RemoteResult:
    """The result of a program on the login node."""

    code: int
    stdout: str
    stderr: str


class RemoteRequest:
    """A request that was sent to hpcaccel on the login node: reads the frames of its reply."""

    def __init__(self, session: ProgramSession, reader: FrameReader) -> None:
        self._session = session
        self._reader = reader

    def frame(self) -> Frame:
        """The next frame.

        Raises:
            ConnectionLost: the stream ended before the last frame.
        """
        try:
            return self._reader.frame()
        except Torn:
            self._session.wait()  # raises if the connection broke
            raise ConnectionLost("hpcaccel on the cluster exited before its reply was complete") from None

    def expect(self, frame: str) -> Frame:
        """The next frame of the kind ``frame``.

        Raises:
            ClusterError: the request failed on the cluster; the error has the cluster's message.
        """
        stderr = b""
        while True:
            head, payload = self.frame()
            if head["frame"] == frame:
                return head, payload
            if head["frame"] == "exit":
                raise ClusterError(stderr.decode("utf-8", "replace").strip().removeprefix("error: "))
            stderr += payload

    def to_the_end(self, **callbacks: Callable[[dict[str, Any], bytes], None]) -> tuple[dict[str, Any], Payloads]:
        """Read all frames.

        Args:
            callbacks: functions by kind of frame, called with head and payload. Such payloads are not returned.

        Returns:
            The head of the last frame (``exit``), and the payloads of the other frames.
        """
        payloads: Payloads = {}
        while True:
            head, payload = self.frame()
            kind = head["frame"]
            if kind == "exit":
                return head, payloads
            if kind in callbacks:
                callbacks[kind](head, payload)
            else:
                payloads[kind] = payloads.get(kind, b"") + payload

    def send(self, data: bytes) -> None:
        self._session.write(data)

    def end_input(self) -> None:
        self._session.close_input()


class RemoteCluster:
    """The login node of a profile with ``host``; connected from the first request until ``close``.

    Raises (every method that connects):
        ClusterError: the host or its key is unknown, the key has changed, the host refuses the login, or hpcaccel is
            missing there, too old or too new.
        Unreachable, ConnectionLost: there is no connection, or it broke; :meth:`again` retries.
    """

    def __init__(
        self,
        profile: ClusterProfile,
        *,
        connection: Connection | None = None,
        note: Callable[[str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        assert profile.host is not None
        self.profile = profile
        self.name = profile.name
        self._given = connection
        self._made: Connection | None = None
        self._note = note or (lambda text: print(text, file=sys.stderr))
        self._sleep, self._now = sleep, now

    def __enter__(self) -> RemoteCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    @property
    def connection(self) -> Connection:
        if self._given is not None:
            return self._given
        if self._made is None:
            self._made = _connect(self.profile)
        return self._made

    # -- any program -------------------------------------------------------------------------------------------------

    def run(
        self,
        args: Sequence[str],
        stdin: bytes | str | None = None,
        *,
        on_output: Callable[[bytes], None] = lambda piece: None,
    ) -> RemoteResult:
        """Run a program in a login shell on the login node and wait for it. No retries; see :meth:`again`.

        Args:
            args: the program and its arguments; no secrets, because all users of the login node can read them.
            on_output: called with each piece of stderr, from another thread.
        """
        session = self.connection.start(command_line(args))
        try:
            errors = Drain(session.read_error, on_output)
            if stdin is not None:
                session.write(stdin.encode() if isinstance(stdin, str) else stdin)
            session.close_input()
            pieces = list(iter(lambda: session.read(1 << 16), b""))
            stderr = errors.all()
            code = session.wait()
        finally:
            session.close()
        return RemoteResult(code, b"".join(pieces).decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))

    def runner(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """A replacement for ``subprocess.run`` for Slurm's commands: ``Slurm(cluster.runner)``.

        The options, such as environment and timeout, are ignored.

        Raises:
            FileNotFoundError: there is no such program.
        """
        answer = self.again(lambda: self.run(["env", "LC_ALL=C", *command]))
        if answer.code == NOT_FOUND:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(list(command), answer.code, answer.stdout, answer.stderr)

    def terminal(self, *args: str) -> int:
        """Run ``hpcaccel <args>`` on the login node, attached to this terminal; returns its exit code."""
        return self.connection.terminal(answering(self.profile.hpcaccel, *args))

    def introduction(self, runs_dir: str | None = None) -> dict[str, Any]:
        """The fields of a request that describe this profile."""
        return {"cluster": self.name, "profile": self.profile.for_login_node(), "runs_dir": runs_dir}

    # -- hpcaccel ----------------------------------------------------------------------------------------------------

    def again(self, action: Callable[[], Any]) -> Any:
        """Run an idempotent action. If the connection breaks, reconnect and run it again, a few times."""
        connected = False
        pauses = iter(PAUSES_SECONDS)
        while True:
            began = self._now()
            try:
                return action()
            except ConnectionLost as error:
                lost: ClusterError = error
                connected = True
                if self._now() - began > STEADY_SECONDS:
                    pauses = iter(PAUSES_SECONDS)
            except Unreachable as error:
                if not connected:
                    raise
                lost = error
            self.connection.close()
            pause = next(pauses, None)
            if pause is None:
                raise ConnectionLost(
                    f"{lost}. Runs on {self.name} are not affected. Run the same command again to pick up where it "
                    "stopped: nothing is submitted twice"
                )
            self._note(f"{lost}; retrying")
            self._sleep(pause)

    def converse(self, request: dict[str, Any], talk: Callable[[RemoteRequest], Any]) -> Any:
        """Send a request to hpcaccel on the login node; ``talk`` reads the reply. No retries; see :meth:`again`."""
        import json

        session = self.connection.start(answering(self.profile.hpcaccel, "answer"))
        try:
            errors = Drain(session.read_error)
            reader = FrameReader(session.read)
            self._read_hello(session, reader, errors)
            session.write(json.dumps({"protocol": PROTOCOL, **request}).encode() + b"\n")
            return talk(RemoteRequest(session, reader))
        finally:
            session.close()

    def _read_hello(self, session: ProgramSession, reader: FrameReader, errors: Drain) -> None:
        while (line := reader.line()) is not None:
            if (hello := parse_hello(line)) is not None:
                self._check_version(*hello)
                return
        stderr = errors.all().decode("utf-8", "replace").strip()
        raise ClusterError(self._no_hello(session.wait(), stderr))

    def _check_version(self, protocol: int, version: str) -> None:
        here = hpcaccel.__version__
        if protocol < PROTOCOL or version_key(version) < version_key(here):
            raise ClusterError(
                f"{self.name} has hpcaccel {version}, older than {here} on this machine. Update it with "
                f"`hpcaccel cluster install {self.name}`; queued jobs are not affected"
            )
        if protocol > PROTOCOL:
            raise ClusterError(
                f"{self.name} has hpcaccel {version}, too new for {here} on this machine. Update this machine: "
                "pip install --upgrade hpcaccel"
            )

    def _no_hello(self, code: int, stderr: str) -> str:
        install = f"`hpcaccel cluster install {self.name}`"
        if "No such command" in stderr:
            return f"hpcaccel on {self.name} is too old for use from other machines. Update it with {install}"
        detail = f" ({stderr.splitlines()[-1]})" if stderr else ""
        if "bad interpreter" in stderr or ("cannot execute" in stderr and code in (NOT_EXECUTABLE, NOT_FOUND)):
            return f"the Python interpreter of hpcaccel on {self.name} is missing{detail}. Reinstall it with {install}"
        if code in (NOT_EXECUTABLE, NOT_FOUND):
            return f"hpcaccel was not found on {self.name}{detail}. Install it with {install}"
        if "No module named" in stderr or "ImportError" in stderr:
            return f"the hpcaccel installation on {self.name} is broken{detail}. Reinstall it with {install}"
        return (
            f"hpcaccel on {self.name} did not respond (exit code {code}){detail}. Log in (ssh {self.profile.host}) and "
            "check whether your login scripts exit early or the home directory is full"
        )


def _connect(profile: ClusterProfile) -> Connection:
    from hpcaccel.submission.remote.connection import FabricConnection
    from hpcaccel.submission.remote.openssh import OpenSshConnection, shares_connections

    assert profile.host is not None
    kind = OpenSshConnection if shares_connections(profile.host) else FabricConnection
    return kind(profile.host, cluster=profile.name)
